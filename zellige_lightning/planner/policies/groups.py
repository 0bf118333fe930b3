"""Placement on disjoint rank groups that each have one configuration (paper, Sec. III-B)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.policies.ledger import Ledger
from zellige_lightning.planner.policies.menu import PolicyProblem
from zellige_lightning.planner.problem import RankSet


@dataclass(frozen=True)
class RankGroup:
    """(G_j, theta_j): ranks that share every sequence which is routed to them."""

    ranks: RankSet
    config: ParallelConfig


Route = Callable[[int], list[int]]


def consecutive(
    sizes: Sequence[int], config_of: Callable[[int], ParallelConfig], first: int = 0
) -> list[RankGroup]:
    """Groups of these sizes on consecutive ranks, in the order given."""
    groups = []
    for size in sizes:
        groups.append(RankGroup(tuple(range(first, first + size)), config_of(size)))
        first += size
    return groups


def longest_first(
    problem: PolicyProblem, groups: Sequence[RankGroup], members: Sequence[int]
) -> Ledger | None:
    """Dearest sequence first, to the group that then finishes earliest (LPT on unlike machines).

    Args:
        members: which groups of the problem to place.

    Returns:
        None where a sequence has no option on any group, or the memory does not suffice.
    """
    ledger = Ledger(problem)
    for g in members:
        prices = [problem.choice(g, x.config, x.ranks) for x in groups]
        heap = [
            (ledger.loads_us[x.ranks[0]] + price.price_us, j)
            for j, (x, price) in enumerate(zip(groups, prices, strict=True))
            if price is not None
        ]
        heapq.heapify(heap)
        for _ in problem.groups[g].members:
            while heap:
                _, j = heap[0]
                price = prices[j]
                assert price is not None
                if ledger.fits_on(price, groups[j].ranks):
                    break
                heapq.heappop(heap)
            else:
                return None
            ledger.add(g, groups[j].config, groups[j].ranks)
            heapq.heapreplace(heap, (ledger.loads_us[groups[j].ranks[0]] + price.price_us, j))
    return ledger


def dearest_first(problem: PolicyProblem) -> list[int]:
    """Groups of the problem by decreasing estimated work."""
    return sorted(
        range(len(problem.groups)), key=lambda g: (-problem.workload.of(problem.groups[g].num_tokens), g)
    )
