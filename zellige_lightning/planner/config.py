"""Settings of the planner: keys of `planner.*` in the configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zellige_lightning.errors import ConfigError
from zellige_lightning.planner.options import FAMILIES, MAX_GROUPS_PER_RANK
from zellige_lightning.planner.policies import POLICIES

# Where each planner's `solve(problem, brief) -> Solution` lives; a module is imported when its planner is
# made.
PLANNERS = {
    "exact": "zellige_lightning.planner.exact:solve_exact",
    "paper": "zellige_lightning.planner.paper:solve_paper",
    "joint": "zellige_lightning.planner.paper:solve_joint",
    **POLICIES,
}
MOST_WAVES = 8
ADAPTIVE = ("exact", "joint")  # planners whose prices may be corrected; the others are compared to the letter


@dataclass(frozen=True)
class PlannerConfig:
    """Settings of the planner; keys of `planner.*` in the configuration.

    Args:
        name: `exact` (joint and certified), `paper` (Algorithm 1), `joint` (its full-batch reference), or a
            rival's policy (docs/POLICIES.md).
        epsilon: slack of Eq. (7)'s second round, relative.
        family: legal rank sets, see `legal_rank_sets`.
        memory_cap_gib: cap per rank; None takes what calibration measured.
        max_degree: no higher split degree; None for no bound.
        num_workers: CP-SAT threads.
        deterministic_limit: CP-SAT's deterministic time per round.
        seed: of CP-SAT.
        ecf: group interchangeable sequences (Eq. (5)); False gives one variable per sequence and option.
        max_groups_per_rank: bound on process groups that one rank may belong to.
        layout: what a rival's user would fix: KnapFormer's bags (`g1n4+g4n1`), USP's factorization (`u4r2`);
            `auto` takes the best one for each batch.
        max_waves: parts that a batch may be cut into where it does not fit at once.
        defer: where that is not enough, leave sequences to the next batch instead of failing.
        ranks_per_node: consecutive ranks fill nodes of that many; None finds the nodes (`detect_topology`).
        online: correct prices by what steps really take (docs/PLANNING.md); only `exact` and `joint` use it.
        online_warmup: measured steps before the first correction.
    """

    name: str = "exact"
    epsilon: float = 1e-3
    family: str = "aligned"
    memory_cap_gib: float | None = None
    max_degree: int | None = None
    num_workers: int = 1
    deterministic_limit: float = 60.0
    seed: int = 0
    ecf: bool = True
    max_groups_per_rank: int = MAX_GROUPS_PER_RANK
    layout: str = "auto"
    max_waves: int = MOST_WAVES
    defer: bool = False
    ranks_per_node: int | None = None
    online: bool = True
    online_warmup: int = 12

    def __post_init__(self) -> None:
        _check(self.name in PLANNERS, "name", self.name, f"one of {sorted(PLANNERS)}")
        _check(self.family in FAMILIES, "family", self.family, f"one of {FAMILIES}")
        _check(_is_number(self.epsilon) and 0 <= self.epsilon <= 1, "epsilon", self.epsilon, "0 to 1")
        cap = self.memory_cap_gib
        _check(cap is None or (_is_number(cap) and cap > 0), "memory_cap_gib", cap, "GiB above 0, or null")
        degree = self.max_degree
        _check(degree is None or is_int(degree, 1), "max_degree", degree, "an integer >= 1, or null")
        limit = self.deterministic_limit
        _check(_is_number(limit) and limit > 0, "deterministic_limit", limit, "a number above 0")
        ranks = self.ranks_per_node
        _check(ranks is None or is_int(ranks, 1), "ranks_per_node", ranks, "an integer >= 1, or null")
        least = {"num_workers": 1, "seed": 0, "max_groups_per_rank": 1, "max_waves": 1, "online_warmup": 5}
        for name, low in least.items():
            _check(is_int(getattr(self, name), low), name, getattr(self, name), f"an integer >= {low}")
        if self.online in ("on", "off"):  # from the command line; in a file YAML reads them as booleans
            object.__setattr__(self, "online", self.online == "on")
        for name in ("ecf", "defer", "online"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        _check(
            isinstance(self.layout, str) and self.layout != "", "layout", self.layout, "`auto` or a layout"
        )

    @property
    def adapts(self) -> bool:
        """Whether prices are corrected while training."""
        return self.online and self.name in ADAPTIVE

    @classmethod
    def of(cls, settings: PlannerConfig | Mapping[str, Any] | None) -> PlannerConfig:
        """From what a user writes. Raises: ConfigError for unknown keys."""
        if settings is None or isinstance(settings, PlannerConfig):
            return settings or cls()
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(map(str, settings)) - known):
            raise ConfigError(f"unknown planner settings {unknown}", fix=f"known are {sorted(known)}")
        return cls(**settings)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_int(value: Any, low: int) -> bool:
    """An integer of at least `low`, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _check(good: bool, name: str, value: Any, want: str) -> None:
    if not good:
        raise ConfigError(f"planner.{name} = {value!r}", fix=f"planner.{name} must be {want}")
