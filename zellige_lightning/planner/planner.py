"""How a planner is made from its settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Protocol

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement.plan import Plan
from zellige_lightning.placement.sequence import GlobalBatch
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.cost import MemoryModel, ProfileTable
from zellige_lightning.planner.menu import OptionMenu
from zellige_lightning.planner.options import FAMILIES, MAX_GROUPS_PER_RANK, check_family

# Where each planner lives; a module is imported when its planner is made.
PLANNERS = {
    "paper": "zellige_lightning.planner.paper:PaperPlanner",
    "joint": "zellige_lightning.planner.paper:JointPlanner",
}


@dataclass(frozen=True)
class PlannerConfig:
    """Settings of the planner; keys of `planner.*` in the configuration.

    Args:
        name: `paper` (Algorithm 1) or `joint` (its full-batch reference).
        epsilon: slack of Eq. (7)'s second round, relative.
        family: legal rank sets, see `legal_rank_sets`.
        memory_cap_gib: cap per rank; None takes what calibration measured.
        max_degree: no higher split degree; None for no bound.
        num_workers: CP-SAT threads.
        deterministic_limit: CP-SAT's deterministic time per round.
        seed: of CP-SAT.
        ecf: group interchangeable sequences (Eq. (5)); False gives one variable per sequence and option.
        max_groups_per_rank: bound on process groups that one rank may belong to.
    """

    name: str = "paper"
    epsilon: float = 1e-3
    family: str = "aligned"
    memory_cap_gib: float | None = None
    max_degree: int | None = None
    num_workers: int = 1
    deterministic_limit: float = 60.0
    seed: int = 0
    ecf: bool = True
    max_groups_per_rank: int = MAX_GROUPS_PER_RANK

    def __post_init__(self) -> None:
        _check(self.name in PLANNERS, "name", self.name, f"one of {sorted(PLANNERS)}")
        _check(self.family in FAMILIES, "family", self.family, f"one of {FAMILIES}")
        _check(_is_number(self.epsilon) and 0 <= self.epsilon <= 1, "epsilon", self.epsilon, "0 to 1")
        cap = self.memory_cap_gib
        _check(cap is None or (_is_number(cap) and cap > 0), "memory_cap_gib", cap, "GiB above 0, or null")
        degree = self.max_degree
        _check(degree is None or _is_int(degree, 1), "max_degree", degree, "an integer >= 1, or null")
        limit = self.deterministic_limit
        _check(_is_number(limit) and limit > 0, "deterministic_limit", limit, "a number above 0")
        for name, low in (("num_workers", 1), ("seed", 0), ("max_groups_per_rank", 1)):
            _check(_is_int(getattr(self, name), low), name, getattr(self, name), f"an integer >= {low}")
        _check(isinstance(self.ecf, bool), "ecf", self.ecf, "true or false")

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


def _is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _check(good: bool, name: str, value: Any, want: str) -> None:
    if not good:
        raise ConfigError(f"planner.{name} = {value!r}", fix=f"planner.{name} must be {want}")


class Planner(Protocol):
    """Places a global batch. The same batch always gets the same plan."""

    def plan(self, batch: GlobalBatch) -> Plan:
        """Raises: PlanningError where no placement was found."""
        ...


def make_planner(
    config: PlannerConfig,
    table: ProfileTable,
    memory: MemoryModel,
    topology: Topology,
    num_heads: int,
    cap_mib: int,
) -> Planner:
    """The planner that `config` names.

    Args:
        cap_mib: memory that sequences may take on one rank, M_cap.

    Raises:
        ConfigError: a cap below 1 MiB, or a family with too many process groups per rank.
    """
    if not _is_int(cap_mib, 1):
        raise ConfigError(f"memory cap of {cap_mib!r} MiB per rank", fix="set planner.memory_cap_gib above 0")
    degrees = {c.degree for c, _ in table.classes if c.degree <= (config.max_degree or topology.world_size)}
    check_family(topology, config.family, degrees, config.max_groups_per_rank)
    menu = OptionMenu(table, memory, topology, num_heads, cap_mib, config.family, config.max_degree)
    module, _, name = PLANNERS[config.name].partition(":")
    planner: Planner = getattr(import_module(module), name)(config, menu)
    return planner
