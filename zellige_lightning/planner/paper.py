"""Algorithm 1 of the paper and its joint-placement reference, both on CP-SAT-ECF."""

from __future__ import annotations

from dataclasses import replace

from zellige_lightning.errors import PlanningError
from zellige_lightning.planner.anchors import EcfResult, SolverLimits, place_anchors
from zellige_lightning.planner.fillers import FillerGroup, pack_fillers
from zellige_lightning.planner.problem import Cell, PlacementProblem, ungrouped
from zellige_lightning.planner.solution import Brief, Solution, sums


def solve_paper(problem: PlacementProblem, brief: Brief) -> Solution:
    """Algorithm 1: anchors by two certified rounds, then whole fillers by Eq. (8).

    Raises:
        PlanningError: a round is not certified optimal, or a filler has no whole option.
        FillerOverflowError: no rank has room for a filler.
    """
    chosen = sorted(brief.anchors)
    anchors = replace(problem, groups=tuple(problem.groups[g] for g in chosen))
    result = _certified(anchors, brief)
    cells = [replace(cell, group=chosen[cell.group]) for cell in result.cells]
    cells += _pack(problem, brief, cells)
    return Solution(tuple(sorted(cells)), statuses=result.statuses)


def _pack(problem: PlacementProblem, brief: Brief, anchors: list[Cell]) -> list[Cell]:
    """Lines 10-15 of Algorithm 1, as counts."""
    loads, memory = sums(problem, anchors)
    fillers, groups = [g for g in range(len(problem.groups)) if g not in brief.anchors], []
    for g in fillers:
        group = problem.groups[g]
        if group.whole is None:
            raise PlanningError(
                f"filler {group.members[0]} (bucket {group.bucket!r}) does not fit whole on a rank, and the "
                "paper's planner keeps fillers whole",
                fix="raise planner.memory_cap_gib, or choose another planner.name",
                step=brief.step,
            )
        groups.append(FillerGroup(group.members, group.whole.price_us, group.whole.memory_mib))
    total = sum(len(group) * us for group, us in zip(problem.groups, brief.whole_us, strict=True))
    ranks = pack_fillers(groups, loads, memory, total, problem.cap_mib)
    counts: dict[tuple[int, int], int] = {}
    for g in fillers:
        for member in problem.groups[g].members:
            key = g, ranks[member]
            counts[key] = counts.get(key, 0) + 1
    whole = {
        g: next(j for j, c in enumerate(problem.groups[g].choices) if c.config.is_whole) for g in fillers
    }
    return [Cell(g, whole[g], (rank,), count) for (g, rank), count in counts.items()]


def solve_joint(problem: PlacementProblem, brief: Brief) -> Solution:
    """The joint-placement reference: the same two rounds over anchors and fillers together.

    Raises:
        PlanningError: a round is not certified optimal.
    """
    result = _certified(problem, brief)
    return Solution(result.cells, result.bound_us, "CP-SAT", result.statuses)


def _certified(problem: PlacementProblem, brief: Brief) -> EcfResult:
    """Lines 3-9 of Algorithm 1. Raises: PlanningError unless both rounds are optimal."""
    config = brief.config
    limits = SolverLimits(config.num_workers, config.deterministic_limit, config.seed)
    if config.ecf:
        result = place_anchors(problem, config.epsilon, limits)
    else:
        direct = place_anchors(ungrouped(problem), config.epsilon, limits)
        result = replace(direct, cells=_regroup(problem, direct.cells))
    if result.is_certified:
        return result
    counts = describe(problem)
    if result.statuses == ("INFEASIBLE",):
        raise does_not_fit(problem, brief.step)
    raise PlanningError(
        f"CP-SAT did not certify the placement of {counts} (rounds: {', '.join(result.statuses)})",
        fix="raise planner.deterministic_limit, or keep planner.family=aligned",
        step=brief.step,
    )


def _regroup(problem: PlacementProblem, cells: tuple[Cell, ...]) -> tuple[Cell, ...]:
    """Counts of the groups from the cells of single sequences."""
    group_of = [g for g, group in enumerate(problem.groups) for _ in group.members]
    counts: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for cell in cells:
        key = group_of[cell.group], cell.choice, cell.ranks
        counts[key] = counts.get(key, 0) + cell.count
    return tuple(sorted(Cell(*key, count) for key, count in counts.items()))


def describe(problem: PlacementProblem) -> str:
    """Such as `2 x video-720p, 40 x image-256p`."""
    return ", ".join(f"{len(g)} x {g.bucket}" for g in problem.groups)


def does_not_fit(problem: PlacementProblem, step: int | None) -> PlanningError:
    """Proven: no placement at all stays under the cap."""
    return PlanningError(
        f"no placement of {describe(problem)} stays under {problem.cap_mib} MiB on each of "
        f"{problem.world_size} ranks",
        fix="raise planner.memory_cap_gib, lower the tokens per batch, or use more ranks",
        step=step,
    )
