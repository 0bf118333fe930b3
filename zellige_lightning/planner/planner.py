"""How a planner is made from its settings, and the planner of global batches."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Protocol

from zellige_lightning.errors import ConfigError, PlanningError
from zellige_lightning.placement.plan import Plan
from zellige_lightning.placement.sequence import Bucket, GlobalBatch
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.assemble import assemble
from zellige_lightning.planner.config import PLANNERS, PlannerConfig, is_int
from zellige_lightning.planner.correction import PriceCorrection
from zellige_lightning.planner.cost import MemoryModel, ProfileTable
from zellige_lightning.planner.cut import CatalogCut
from zellige_lightning.planner.deferral import PlannedBatch, plan_or_defer
from zellige_lightning.planner.fillers import FillerOverflowError
from zellige_lightning.planner.filling import filling_of
from zellige_lightning.planner.menu import OptionMenu
from zellige_lightning.planner.options import check_family
from zellige_lightning.planner.policies import POLICIES
from zellige_lightning.planner.policies.menu import PolicyMenu
from zellige_lightning.planner.precedent import Precedent, simplest
from zellige_lightning.planner.problem import Cell, PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution, num_splits
from zellige_lightning.planner.waves import Wave, plan_waves

CACHED_SOLUTIONS = 256


class Planner(Protocol):
    """Places a global batch. The same batch always gets the same plan."""

    def plan(self, batch: GlobalBatch) -> Plan:
        """Raises: PlanningError where no placement was found."""
        ...

    def plan_ladder(self, batch: GlobalBatch, carried: Collection[str] = ()) -> PlannedBatch:
        """The batch at once, in waves, or without what must wait. Raises: PlanningError."""
        ...

    def prepare(self) -> None:
        """Pays now for what the first plan would pay otherwise."""
        ...

    def for_evaluation(self) -> Planner:
        """One that leaves no sequence to a later batch, and can be used in another thread."""
        ...

    def use(self, table: ProfileTable, correction: PriceCorrection, precedent: Precedent) -> None:
        """What plans depend on from now on, beside the batch."""
        ...

    @property
    def hit_rate(self) -> float:
        """Share of batches that were answered from the cache."""
        ...


def make_planner(
    config: PlannerConfig,
    table: ProfileTable,
    memory: MemoryModel,
    topology: Topology,
    num_heads: int,
    cap_mib: int,
) -> BatchPlanner:
    """The planner that `config` names. Cheap: its solver is imported and compiled at the first batch, or by
    `BatchPlanner.prepare`, so that ranks that never plan do neither.

    Args:
        cap_mib: memory that sequences may take on one rank, M_cap.

    Raises:
        ConfigError: a cap below 1 MiB, a family with too many process groups per rank, or a rival's layout
            that the world or the heads do not allow.
    """
    if not is_int(cap_mib, 1):
        raise ConfigError(f"memory cap of {cap_mib!r} MiB per rank", fix="set planner.memory_cap_gib above 0")
    degrees = {c.degree for c, _ in table.classes if c.degree <= (config.max_degree or topology.world_size)}
    check_family(topology, config.family, degrees, config.max_groups_per_rank)
    menu_type = PolicyMenu if config.name in POLICIES else OptionMenu
    menu = menu_type(table, memory, topology, num_heads, cap_mib, config.family, config.max_degree)
    planner = BatchPlanner(config, menu)
    if config.name in POLICIES:
        planner.prepare()  # says now what is wrong with a rival's layout
    return planner


Solve = Callable[[PlacementProblem, Brief], Solution]
Found = tuple[Solution, tuple[Cell, ...]]  # and all sequences whole, where that may be simpler


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
    num_plans: int = 0
    num_hits: int = 0
    correction: PriceCorrection = field(default_factory=PriceCorrection)
    precedent: Precedent = field(default_factory=Precedent)
    _cut: CatalogCut = field(init=False)
    _cache: OrderedDict[tuple[str, tuple[tuple[Bucket, int], ...]], Found] = field(
        default_factory=OrderedDict, repr=False
    )

    def __post_init__(self) -> None:
        self._cut, self._measured = CatalogCut.of_table(self.menu.table), self.menu.table

    def use(self, table: ProfileTable, correction: PriceCorrection, precedent: Precedent) -> None:
        """Plans depend on these from now on, beside the batch.

        Args:
            table: prices as measured.
            correction: of these.
            precedent: where the previous batch was placed.
        """
        self.precedent = precedent
        if (table.version, correction) == (self._measured.version, self.correction):
            return
        if table.version != self._measured.version:
            self.forget()
        self._measured, self.correction = table, correction
        corrected = correction.apply(table)
        self.menu = replace(self.menu, table=corrected, slowness=correction.slowness, _menus={})
        self._cut = CatalogCut.of_table(corrected)

    @property
    def hit_rate(self) -> float:
        return self.num_hits / max(1, self.num_plans)

    @cached_property
    def solve(self) -> Solve:
        """Imported at first use: only the rank that plans needs a solver."""
        return load_solve(self.config.name)

    def prepare(self) -> None:
        """Pays for imports and compilation now, by placing one sequence of the catalog. Optional: for the
        rank that plans, in any thread, while training is set up. Changes no plan."""
        for bucket in self.menu.table.buckets:
            if self.menu.choices(bucket):
                problem, brief = self.problem(GlobalBatch.of(0, 0, [("prepare", bucket)]))
                with suppress(PlanningError):  # this bucket may never come alone, or not at all
                    self.solve(problem, brief)
                return

    def for_evaluation(self) -> BatchPlanner:
        """With a cache of its own, on the same menu."""
        return BatchPlanner(replace(self.config, defer=False), self.menu)

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
        counts = tuple((batch.sequences[group.members[0]].bucket, len(group)) for group in problem.groups)
        key = self.correction.version, counts
        self.num_plans += 1
        if (found := self._cache.get(key)) is not None:
            self.num_hits += 1
            self._cache.move_to_end(key)
        else:
            found = self._cache[key] = self._find(batch, problem, brief)
            if len(self._cache) > CACHED_SOLUTIONS:
                self._cache.popitem(last=False)
        solution, wholes = found
        if noise := self.correction.noise:
            solution = simplest(problem, solution, wholes, self.precedent, noise)
        plan = assemble(batch, problem, brief, solution, self.menu.table.fixed_us)
        plan = replace(plan, filling=filling_of(plan, batch, self.menu.table, self.menu.topology))
        solve_ms = (time.perf_counter() - start) * 1e3
        return replace(plan, solve_ms=solve_ms, price_version=self.correction.version)

    def _find(self, batch: GlobalBatch, problem: PlacementProblem, brief: Brief) -> Found:
        solution = self._solve(batch, problem, brief)
        if not (self.correction.noise and num_splits(solution.cells)):
            return solution, ()
        from zellige_lightning.planner.wholes import all_whole  # compiles, like what has solved

        return solution, all_whole(problem, solution.bound_us)

    def plan_waves(self, batch: GlobalBatch) -> list[Wave]:
        """The batch as waves that all plan, see `plan_waves`. Raises: PlanningError where none do."""
        return plan_waves(self, batch, self.config.max_waves)

    def plan_ladder(self, batch: GlobalBatch, carried: Collection[str] = ()) -> PlannedBatch:
        """All that can be done for a batch: at once, in waves, or (`planner.defer`) without what must wait
        for the next batch, see `plan_or_defer`. Raises: PlanningError."""
        return plan_or_defer(self, batch, carried)

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
