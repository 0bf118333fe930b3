"""HotSPa-like: one configuration per length group, the groups in turn (its example in PKU-DAIR/Hetu)."""

from __future__ import annotations

from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.policies.groups import consecutive, dearest_first, longest_first
from zellige_lightning.planner.policies.ledger import Ledger, no_option
from zellige_lightning.planner.policies.menu import PolicyProblem, policy_problem
from zellige_lightning.planner.problem import PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution

LENGTHS = (32_768, 16_384, 4_096, 0)  # its example's `--bucket_sizes`: lower ends of the length groups


def solve_hotspa(problem: PlacementProblem, brief: Brief) -> Solution:
    """Each length group gets the configuration, on equal consecutive rank groups, under which it alone ends
    earliest.

    The loads of a plan add up per rank. HotSPa waits between its length groups, so its own step would be no
    shorter than this.

    Raises:
        PlanningError: a length group fits no configuration, or all together run out of memory.
    """
    known = policy_problem(problem)
    total = Ledger(known)
    for members in length_groups(known):
        phase = _best(known, members)
        if phase is None:
            raise no_option(known, members[0], "configuration for its length group", brief)
        for row in phase.rows():
            total.add(*row)
    return total.solution(brief)


def length_groups(problem: PolicyProblem) -> list[list[int]]:
    """Groups of the problem by length group, longest first; empty ones left out."""
    rows: dict[int, list[int]] = {low: [] for low in LENGTHS}
    for g in dearest_first(problem):
        rows[next(low for low in LENGTHS if problem.groups[g].num_tokens >= low)].append(g)
    return [members for members in rows.values() if members]


def _best(problem: PolicyProblem, members: list[int]) -> Ledger | None:
    """The placement of one length group that ends earliest (ties: the smallest degree)."""
    dividing = [c for c in problem.configs if problem.world_size % c.degree == 0 and c.q == 1]
    found = [ledger for c in dividing if (ledger := _place(problem, members, c)) is not None]
    return min(found, key=lambda ledger: ledger.makespan_us, default=None)


def _place(problem: PolicyProblem, members: list[int], config: ParallelConfig) -> Ledger | None:
    groups = consecutive([config.degree] * (problem.world_size // config.degree), lambda _: config)
    return longest_first(problem, groups, members)
