"""How a planner is made from its settings."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any, Protocol

from zellige_lightning.errors import ConfigError, PlanningError
from zellige_lightning.placement.plan import Plan
from zellige_lightning.placement.sequence import Bucket, GlobalBatch
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.assemble import assemble
from zellige_lightning.planner.cost import MemoryModel, ProfileTable
from zellige_lightning.planner.cut import CatalogCut
from zellige_lightning.planner.fillers import FillerOverflowError
from zellige_lightning.planner.menu import OptionMenu
from zellige_lightning.planner.options import FAMILIES, MAX_GROUPS_PER_RANK, check_family
from zellige_lightning.planner.policies import POLICIES
from zellige_lightning.planner.policies.menu import PolicyMenu
from zellige_lightning.planner.problem import PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution
from zellige_lightning.planner.waves import Wave, plan_waves

# Where each planner's `solve(problem, brief) -> Solution` lives; a module is imported when its planner is
# made.
PLANNERS = {
    "exact": "zellige_lightning.planner.exact:solve_exact",
    "paper": "zellige_lightning.planner.paper:solve_paper",
    "joint": "zellige_lightning.planner.paper:solve_joint",
    **POLICIES,
}
CACHED_SOLUTIONS = 256


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
        _check(
            isinstance(self.layout, str) and self.layout != "", "layout", self.layout, "`auto` or a layout"
        )

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
) -> BatchPlanner:
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
    menu_type = PolicyMenu if config.name in POLICIES else OptionMenu
    menu = menu_type(table, memory, topology, num_heads, cap_mib, config.family, config.max_degree)
    planner = BatchPlanner(config, menu, load_solve(config.name))
    planner.warm_up()
    return planner


Solve = Callable[[PlacementProblem, Brief], Solution]


def load_solve(name: str) -> Solve:
    """The `solve` function of a planner or policy, its module imported now."""
    module, _, function = PLANNERS[name].partition(":")
    solve: Solve = getattr(import_module(module), function)
    return solve


@dataclass
class BatchPlanner:
    """Any planner or policy on global batches, with a cache: batches of equal bucket counts share a solution.

    Attributes:
        num_plans, num_hits: batches planned, and those that were answered from the cache.
    """

    config: PlannerConfig
    menu: OptionMenu
    solve: Solve
    num_plans: int = 0
    num_hits: int = 0
    _cut: CatalogCut = field(init=False)
    _cache: OrderedDict[tuple[tuple[Bucket, int], ...], Solution] = field(
        default_factory=OrderedDict, repr=False
    )

    def __post_init__(self) -> None:
        self._cut = CatalogCut.of_table(self.menu.table)

    @property
    def hit_rate(self) -> float:
        return self.num_hits / max(1, self.num_plans)

    def warm_up(self) -> None:
        """Plans one sequence of the catalog, so that compilation and imports are paid before the first
        step."""
        for bucket in self.menu.table.buckets:
            if self.menu.choices(bucket):
                problem, brief = self.problem(GlobalBatch.of(0, 0, [("warm-up", bucket)]))
                with suppress(PlanningError):  # this bucket may never come alone, or not at all
                    self.solve(problem, brief)
                return

    def forget(self) -> None:
        """Empties the cache."""
        self._cache.clear()

    def problem(self, batch: GlobalBatch) -> tuple[PlacementProblem, Brief]:
        """What `solve` gets for a batch. Raises: PlanningError where a sequence fits no option."""
        problem, table = self.menu.problem(batch), self.menu.table
        buckets = [batch.sequences[group.members[0]].bucket for group in problem.groups]
        anchors = frozenset(g for g, bucket in enumerate(buckets) if self._cut.is_anchor(table, bucket))
        return problem, Brief(self.config, anchors, tuple(map(table.whole_us, buckets)), batch.step)

    def plan(self, batch: GlobalBatch) -> Plan:
        """Raises: PlanningError, with the sequence named where it is one that does not fit."""
        start = time.perf_counter()
        problem, brief = self.problem(batch)
        key = tuple((batch.sequences[group.members[0]].bucket, len(group)) for group in problem.groups)
        self.num_plans += 1
        if (solution := self._cache.get(key)) is not None:
            self.num_hits += 1
            self._cache.move_to_end(key)
        else:
            solution = self._solve(batch, problem, brief)
            self._cache[key] = solution
            if len(self._cache) > CACHED_SOLUTIONS:
                self._cache.popitem(last=False)
        plan = assemble(batch, problem, brief, solution, self.menu.table.fixed_us)
        return replace(plan, solve_ms=(time.perf_counter() - start) * 1e3)

    def plan_waves(self, batch: GlobalBatch) -> list[Wave]:
        """The batch as waves that all plan, see `plan_waves`. Raises: PlanningError where none do."""
        return plan_waves(self, batch)

    def _solve(self, batch: GlobalBatch, problem: PlacementProblem, brief: Brief) -> Solution:
        try:
            return self.solve(problem, brief)
        except FillerOverflowError as error:
            sequence = batch.sequences[error.member]
            raise PlanningError(
                f"filler {error.member} ({sequence.key!r}, bucket {sequence.bucket.name!r}) needs "
                f"{error.need_mib} MiB; the emptiest rank has {error.most_free_mib} of "
                f"{problem.cap_mib} MiB left",
                fix="raise planner.memory_cap_gib, lower the tokens per batch, or choose planner.name=exact",
                step=batch.step,
            ) from error
