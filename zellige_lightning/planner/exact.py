"""planner=exact: joint placement of anchors and fillers with a certified bound."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import gcd

from zellige_lightning.errors import PlanningError
from zellige_lightning.planner.block_starts import has_starts, search_with_starts
from zellige_lightning.planner.consolidate import consolidate, spare_links
from zellige_lightning.planner.decider import FEW_SEQUENCES
from zellige_lightning.planner.pods import search_pods
from zellige_lightning.planner.problem import Choice, PlacementProblem
from zellige_lightning.planner.search import ExactSearch, SearchResult
from zellige_lightning.planner.solution import Brief, Solution, num_splits, sums

MOST_RANKS = 64  # above it the world is searched in pods
POD_BOUND = "area at T"  # what bounds a placement by pods
NODE_LIMITS = (10_000, 40_000)  # of one decision and of all, on few ranks
NODE_LIMITS_LARGE = (1_000, 4_000)  # above 8 ranks, where a node costs more
NODE_LIMITS_LONG = (30_000, 120_000)  # the same, where those left a gap
CPSAT_LIMIT = 10.0  # deterministic time of the rescue by CP-SAT, per round
CLOSING_LIMIT = 1.0  # the same for closing a gap that the search left open
OPEN_GAP = 0.003  # above which few sequences are worth a short integer program
WIDE_GAP, MOST_VARIABLES = 0.01, 4_000  # above which a longer one is, for many sequences too


def solve_exact(problem: PlacementProblem, brief: Brief) -> Solution:
    """`search_problem` in the largest common unit of all prices (rescaling them changes no placement), with
    what starting blocks costs; then fewest distinct rank sets, then fewest bytes."""
    check_range(problem)
    choices = [c for g in problem.groups for c in g.choices]
    unit = max(1, gcd(*(us for c in choices for us in (c.price_us, c.nominal_us, c.start_us))))
    groups = (replace(g, choices=tuple(_in_unit(c, unit) for c in g.choices)) for g in problem.groups)
    scaled = problem if unit == 1 else replace(problem, groups=tuple(groups))
    epsilon = brief.config.epsilon
    if has_starts(scaled):
        solution = search_with_starts(scaled, epsilon, partial(search_problem, brief=brief))
        solution = _restated(scaled, solution, epsilon)
    else:
        solution = search_problem(scaled, brief)
    solution = _simplified(scaled, solution, epsilon)
    return replace(solution, bound_us=solution.bound_us * unit)


def _in_unit(choice: Choice, unit: int) -> Choice:
    return replace(
        choice,
        price_us=choice.price_us // unit,
        nominal_us=choice.nominal_us // unit,
        start_us=choice.start_us // unit,
    )


def _restated(problem: PlacementProblem, solution: Solution, epsilon: float) -> Solution:
    """What is proven without starts, said of the makespan with them."""
    if not solution.cells:
        return solution
    makespan, bound = max(sums(problem, solution.cells)[0]), solution.bound_us
    is_near = makespan <= bound + int(bound * epsilon)
    fewest = is_near and num_splits(solution.cells) == solution.split_bound
    return replace(solution, statuses=_statuses(makespan, bound, epsilon, fewest))


def _simplified(problem: PlacementProblem, solution: Solution, epsilon: float) -> Solution:
    """Fewer distinct rank sets and bytes for the same makespan and splits, but of pods, whose rank sets are
    too many."""
    if solution.bound_source == POD_BOUND or not solution.cells:
        return solution
    slack = max(max(sums(problem, solution.cells)[0]), solution.bound_us + int(solution.bound_us * epsilon))
    return replace(solution, cells=spare_links(problem, consolidate(problem, solution.cells, slack), slack))


def check_range(problem: PlacementProblem) -> None:
    """Products of times and memories must stay inside 63 bits. Raises: PlanningError naming the sums."""
    time_us = sum(len(g) * max(c.price_us + c.start_us for c in g.choices) for g in problem.groups)
    largest = max(problem.cap_mib, 1024 * problem.world_size)
    if time_us * largest >= 1 << 61:
        raise PlanningError(
            f"prices add up to {time_us} us under a cap of {problem.cap_mib} MiB, beyond what is searched",
            fix="check the profile's unit (microseconds) and planner.memory_cap_gib",
        )


def search_problem(problem: PlacementProblem, brief: Brief) -> Solution:
    """Makespan first, then fewest splits within epsilon, of sums of prices.

    Where the search finds no placement and no proof that there is none (memory so tight that light
    sequences do not pack), CP-SAT looks for any.

    Raises:
        PlanningError: proven that nothing fits, or nothing found.
    """
    if not problem.groups:
        return Solution((), statuses=("OPTIMAL", "OPTIMAL"), bound_source="search")
    epsilon = brief.config.epsilon
    if problem.world_size > MOST_RANKS and (found := search_pods(problem, epsilon, NODE_LIMITS_LARGE[0])):
        makespan, dealt, bound = found
        statuses = _statuses(makespan, bound, epsilon, False)
        return Solution(tuple(dealt), bound, POD_BOUND, statuses)
    is_few = problem.num_sequences <= FEW_SEQUENCES and problem.world_size <= MOST_RANKS
    limits = NODE_LIMITS if is_few or problem.world_size <= 8 else NODE_LIMITS_LARGE
    result = ExactSearch(problem, epsilon, *limits).solve()
    if limits is NODE_LIMITS_LARGE and result.cells and _gap(result) > OPEN_GAP:
        result = ExactSearch(problem, epsilon, *NODE_LIMITS_LONG).solve()
    if result.proven_infeasible:
        raise _does_not_fit(problem, brief)
    if not result.cells:
        return _rescue(problem, brief, result)
    solution = _certificate(result, epsilon)
    gap = _gap(result)
    if gap > OPEN_GAP and (is_few or gap > WIDE_GAP) and num_variables(problem) <= MOST_VARIABLES:
        limit = CLOSING_LIMIT if gap > WIDE_GAP else CLOSING_LIMIT / 10
        solution = _close(problem, brief, solution, result.makespan_us, limit)
    return solution


def _gap(result: SearchResult) -> float:
    return result.makespan_us / max(1, result.bound_us) - 1


def num_variables(problem: PlacementProblem) -> int:
    """Of the integer program."""
    return sum(len(choice.rank_sets) for group in problem.groups for choice in group.choices)


def _certificate(result: SearchResult, epsilon: float) -> Solution:
    fewest = result.num_splits == result.split_bound
    statuses = _statuses(result.makespan_us, result.bound_us, epsilon, fewest)
    return Solution(result.cells, result.bound_us, "search", statuses, result.split_bound, result.nodes)


def _statuses(makespan_us: int, bound_us: int, epsilon: float, fewest: bool) -> tuple[str, str]:
    """`OPTIMAL` where the bound is met, `CERTIFIED` within epsilon of it, `OPEN` otherwise; likewise the
    splits."""
    if makespan_us == bound_us:
        first = "OPTIMAL"
    else:
        first = "CERTIFIED" if makespan_us <= bound_us + int(bound_us * epsilon) else "OPEN"
    return first, "OPTIMAL" if fewest else "OPEN"


def _does_not_fit(problem: PlacementProblem, brief: Brief) -> PlanningError:
    from zellige_lightning.planner.paper import (
        does_not_fit,
    )  # ortools is slow to import and rarely needed here

    return does_not_fit(problem, brief.step)


def _close(
    problem: PlacementProblem, brief: Brief, solution: Solution, makespan_us: int, limit: float
) -> Solution:
    """CP-SAT's proof where the search's bounds are weak: few sequences that do not divide evenly, and memory
    that must be filled almost exactly. Whatever it proves or finds within its limit is taken."""
    from zellige_lightning.planner.anchors import SolverLimits, place_anchors

    epsilon = brief.config.epsilon
    found = place_anchors(problem, epsilon, SolverLimits(1, limit, brief.config.seed))
    if found.is_certified:
        splits = num_splits(found.cells)
        return Solution(found.cells, found.bound_us, "CP-SAT", found.statuses, splits, solution.nodes)
    if found.cells and (better := max(sums(problem, found.cells)[0])) < makespan_us:
        makespan_us, solution = better, replace(solution, cells=found.cells, split_bound=0)
    if found.bound_us > solution.bound_us:
        solution = replace(solution, bound_us=found.bound_us, bound_source="CP-SAT")
        if solution.bound_us + int(solution.bound_us * epsilon) > makespan_us:
            solution = replace(solution, split_bound=0)  # it was proven up to the makespan only
    fewest = num_splits(solution.cells) == solution.split_bound
    return replace(solution, statuses=_statuses(makespan_us, solution.bound_us, epsilon, fewest))


def _rescue(problem: PlacementProblem, brief: Brief, result: SearchResult) -> Solution:
    from zellige_lightning.planner.anchors import SolverLimits, place_anchors
    from zellige_lightning.planner.paper import describe

    for limit in (CLOSING_LIMIT, CPSAT_LIMIT):  # any placement will do: no long search for a better one
        found = place_anchors(problem, brief.config.epsilon, SolverLimits(1, limit, brief.config.seed))
        if found.cells or found.statuses == ("INFEASIBLE",):
            break
    if found.statuses == ("INFEASIBLE",):
        raise _does_not_fit(problem, brief)
    if not found.cells:
        raise PlanningError(
            f"no placement of {describe(problem)} was found under {problem.cap_mib} MiB on each of "
            f"{problem.world_size} ranks",
            fix="raise planner.memory_cap_gib or lower the tokens per batch",
            step=brief.step,
        )
    bound = max(result.bound_us, found.bound_us)
    source = "search" if result.bound_us >= found.bound_us else "CP-SAT"
    split_bound = num_splits(found.cells) if found.is_certified else 0
    return Solution(found.cells, bound, source, found.statuses, split_bound, result.nodes)
