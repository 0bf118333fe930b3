"""Algorithm 1 of the paper and its joint-placement reference, both on CP-SAT-ECF."""

from __future__ import annotations

import time
from dataclasses import dataclass

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import Plan, rank_sums, whole
from zellige_lightning.placement.sequence import GlobalBatch
from zellige_lightning.planner.anchors import EcfResult, SolverLimits, place_anchors
from zellige_lightning.planner.assemble import Placed, assemble
from zellige_lightning.planner.cut import CatalogCut
from zellige_lightning.planner.fillers import FillerGroup, FillerOverflowError, pack_fillers
from zellige_lightning.planner.menu import OptionMenu
from zellige_lightning.planner.planner import PlannerConfig
from zellige_lightning.planner.problem import Group, PlacementProblem, decode, ungrouped


def _milliseconds_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3


@dataclass
class PaperPlanner:
    """Algorithm 1: anchors by two certified CP-SAT-ECF rounds, then whole fillers by Eq. (8)."""

    config: PlannerConfig
    menu: OptionMenu

    def plan(self, batch: GlobalBatch) -> Plan:
        """Raises: PlanningError where a round is not certified optimal or a filler does not fit."""
        start = time.perf_counter()
        problem = self.menu.problem(batch)
        table, cut = self.menu.table, CatalogCut.of_table(self.menu.table)
        is_anchor = [cut.is_anchor(table, batch.sequences[g.members[0]].bucket) for g in problem.groups]
        anchors = PlacementProblem(
            problem.world_size,
            problem.cap_mib,
            tuple(g for g, anchor in zip(problem.groups, is_anchor, strict=True) if anchor),
        )
        placed, result = _certified(anchors, self.config, batch.step)
        fillers = [g for g, anchor in zip(problem.groups, is_anchor, strict=True) if not anchor]
        placed |= self._pack(batch, fillers, placed)
        solve_ms = _milliseconds_since(start)
        return assemble(
            batch, problem, self.menu, placed, planner="paper", statuses=result.statuses, solve_ms=solve_ms
        )

    def _pack(self, batch: GlobalBatch, fillers: list[Group], placed: Placed) -> Placed:
        world, table = self.menu.topology.world_size, self.menu.table
        options = [option for _, option in placed.values()]
        loads = list(rank_sums(options, (c.price_us for c, _ in placed.values()), world))
        memory = list(rank_sums(options, (c.memory_mib for c, _ in placed.values()), world))
        groups, choice_of = [], {}
        for group in fillers:
            if group.whole is None:
                raise _filler_without_whole(batch, group.members[0])
            groups.append(FillerGroup(group.members, group.whole.price_us, group.whole.memory_mib))
            choice_of.update(dict.fromkeys(group.members, group.whole))
        total = sum(table.whole_us(s.bucket) for s in batch.sequences)
        try:
            ranks = pack_fillers(groups, loads, memory, total, self.menu.cap_mib)
        except FillerOverflowError as error:
            raise _filler_does_not_fit(batch, error, self.menu.cap_mib) from error
        return {member: (choice_of[member], whole(rank)) for member, rank in ranks.items()}


@dataclass
class JointPlanner:
    """The paper's joint-placement reference: the same two rounds over anchors and fillers together."""

    config: PlannerConfig
    menu: OptionMenu

    def plan(self, batch: GlobalBatch) -> Plan:
        """Raises: PlanningError where a round is not certified optimal."""
        start = time.perf_counter()
        problem = self.menu.problem(batch)
        placed, result = _certified(problem, self.config, batch.step)
        return assemble(
            batch,
            problem,
            self.menu,
            placed,
            lower_bound_us=result.bound_us,
            bound_source="CP-SAT",
            planner="joint",
            statuses=result.statuses,
            solve_ms=_milliseconds_since(start),
        )


def _limits(config: PlannerConfig) -> SolverLimits:
    return SolverLimits(config.num_workers, config.deterministic_limit, config.seed)


def _certified(problem: PlacementProblem, config: PlannerConfig, step: int) -> tuple[Placed, EcfResult]:
    """Lines 3-9 of Algorithm 1. Raises: PlanningError unless both rounds are optimal."""
    problem = problem if config.ecf else ungrouped(problem)
    result = place_anchors(problem, config.epsilon, _limits(config))
    if result.is_certified:
        return decode(problem, result.cells), result
    counts = ", ".join(f"{len(g)} x {g.bucket}" for g in problem.groups)
    if result.statuses == ("INFEASIBLE",):
        raise PlanningError(
            f"no placement of {counts} stays under {problem.cap_mib} MiB on each of "
            f"{problem.world_size} ranks",
            fix="raise planner.memory_cap_gib, lower the tokens per batch, or use more ranks",
            step=step,
        )
    raise PlanningError(
        f"CP-SAT did not certify the placement of {counts} (rounds: {', '.join(result.statuses)})",
        fix="raise planner.deterministic_limit, or keep planner.family=aligned",
        step=step,
    )


def _filler_without_whole(batch: GlobalBatch, index: int) -> PlanningError:
    sequence = batch.sequences[index]
    return PlanningError(
        f"filler {index} ({sequence.key!r}, bucket {sequence.bucket.name!r}) does not fit whole on a rank, "
        "and the paper's planner keeps fillers whole",
        fix="raise planner.memory_cap_gib, or choose planner.name=joint",
        step=batch.step,
    )


def _filler_does_not_fit(batch: GlobalBatch, error: FillerOverflowError, cap_mib: int) -> PlanningError:
    sequence = batch.sequences[error.member]
    return PlanningError(
        f"filler {error.member} ({sequence.key!r}, bucket {sequence.bucket.name!r}) needs "
        f"{error.need_mib} MiB; the emptiest rank has {error.most_free_mib} of {cap_mib} MiB left",
        fix="raise planner.memory_cap_gib, lower the tokens per batch, or choose planner.name=joint",
        step=batch.step,
    )
