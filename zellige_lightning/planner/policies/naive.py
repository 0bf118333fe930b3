"""Naive data parallelism: whole sequences, equal tokens per rank (paper, Sec. II-C)."""

from __future__ import annotations

import heapq

from zellige_lightning.placement.plan import WHOLE
from zellige_lightning.planner.policies.ledger import Ledger, require_whole
from zellige_lightning.planner.policies.menu import policy_problem
from zellige_lightning.planner.problem import PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution


def solve_naive(problem: PlacementProblem, brief: Brief) -> Solution:
    """Longest sequence first, to the rank with the fewest tokens (ties: lowest rank). Memory is not looked
    at.

    Raises:
        PlanningError: the placement would run out of memory.
    """
    known = policy_problem(problem)
    ledger = Ledger(known)
    heap = [(0, rank) for rank in range(known.world_size)]
    for g in sorted(range(len(known.groups)), key=lambda g: (-known.groups[g].num_tokens, g)):
        require_whole(known, g, brief)
        group = known.groups[g]
        for _ in group.members:
            tokens, rank = heap[0]
            ledger.add(g, WHOLE, (rank,))
            heapq.heapreplace(heap, (tokens + group.num_tokens, rank))
    return ledger.solution(brief)
