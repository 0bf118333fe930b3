"""Skrull-like: each sequence is either whole on one rank or split over all ranks (NeurIPS 2025; no public
code found)."""

from __future__ import annotations

import heapq

from zellige_lightning.placement.plan import WHOLE
from zellige_lightning.planner.policies.groups import dearest_first
from zellige_lightning.planner.policies.ledger import Ledger, no_option
from zellige_lightning.planner.policies.menu import PolicyProblem, policy_problem
from zellige_lightning.planner.problem import Choice, PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution

MOST_TRIED = 64  # split counts inside the anchors' buckets; beyond them whole buckets at a time


def solve_skrull(problem: PlacementProblem, brief: Brief) -> Solution:
    """The m longest sequences go over all ranks with the cheapest configuration of that degree, the rest
    are dealt whole, dearest first to the least-loaded rank with room; the best m counts.

    Raises:
        PlanningError: no m stays under the cap.
    """
    known = policy_problem(problem)
    order = dearest_first(known)
    found = [ledger for m in _counts(known, order, brief) if (ledger := _place(known, order, m)) is not None]
    if not found:
        raise no_option(known, order[0], "placement that is whole or over all ranks", brief)
    return min(found, key=lambda ledger: ledger.makespan_us).solution(brief)


def _counts(problem: PolicyProblem, order: list[int], brief: Brief) -> list[int]:
    """How many of the longest to split: every number among the anchors, then whole buckets."""
    sizes = [len(problem.groups[g]) for g in order]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    anchors = sum(size for g, size in zip(order, sizes, strict=True) if g in brief.anchors)
    return sorted({0, *range(min(anchors, MOST_TRIED) + 1), *ends})


def _over_all(problem: PolicyProblem, group: int) -> Choice | None:
    choices = [c for c in problem.groups[group].choices if c.config.degree == problem.world_size]
    return min(choices, key=lambda c: (c.price_us, c.memory_mib, c.config), default=None)


def _place(problem: PolicyProblem, order: list[int], num_split: int) -> Ledger | None:
    ledger, left, everyone = Ledger(problem), num_split, tuple(range(problem.world_size))
    whole: list[tuple[int, int]] = []
    for g in order:
        split = min(left, len(problem.groups[g]))
        left -= split
        whole.append((g, len(problem.groups[g]) - split))
        choice = _over_all(problem, g)
        if split and choice is None:
            return None
        if split and choice is not None:
            ledger.add(g, choice.config, everyone, split)
    if not ledger.fits:
        return None
    return ledger if all(_deal(ledger, g, count) for g, count in whole) else None


def _deal(ledger: Ledger, group: int, count: int) -> bool:
    """`count` members whole, each to the least-loaded rank that has room. Only the rank that takes one
    changes."""
    choice = ledger.choice(group, WHOLE, (0,))
    if count and choice is None:
        return False
    heap = [(load, rank) for rank, load in enumerate(ledger.loads_us)]
    heapq.heapify(heap)
    for _ in range(count):
        assert choice is not None
        while heap and not ledger.fits_on(choice, (heap[0][1],)):
            heapq.heappop(heap)
        if not heap:
            return False
        rank = heap[0][1]
        ledger.add(group, WHOLE, (rank,))
        heapq.heapreplace(heap, (ledger.loads_us[rank], rank))
    return True
