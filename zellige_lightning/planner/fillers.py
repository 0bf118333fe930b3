"""Filler Packing: whole fillers into the remaining time and memory headroom (paper, Eq. (8)).

Eq. (8) may compare a time slack with a memory slack because each is a share of its own whole: of F, what a
rank would work if all were even, and of M_cap, what it may hold.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FillerGroup:
    """Fillers of one bucket. `members` ascend; price and memory are those of the whole sequence on any
    rank."""

    members: tuple[int, ...]
    price_us: int
    memory_mib: int


class FillerOverflowError(Exception):
    """No rank has the memory headroom. Internal to the planner, which turns it into a `PlanningError`."""

    def __init__(self, member: int, need_mib: int, most_free_mib: int) -> None:
        super().__init__(
            f"filler {member} needs {need_mib} MiB; the emptiest rank has {most_free_mib} MiB left"
        )
        self.member, self.need_mib, self.most_free_mib = member, need_mib, most_free_mib


def pack_fillers(
    groups: Sequence[FillerGroup],
    loads_us: list[int],
    memory_mib: list[int],
    total_whole_us: int,
    cap_mib: int,
) -> dict[int, int]:
    """Rank of every filler; updates the ledgers `loads_us` (C_r) and `memory_mib` (M_r) in place.

    Fillers are taken by decreasing price, ties by lowest sequence index; the best rank by Eq. (8), ties by
    lowest rank. Scores are compared as exact integers: with F = total / N both slacks are multiplied by N
    F M_cap.

    Args:
        total_whole_us: sum of the whole-sequence prices of the batch, N * F.
    """
    ranks: dict[int, int] = {}
    for group in sorted(groups, key=lambda g: (-g.price_us, g.members[0])):
        ranks.update(_pack_group(group, loads_us, memory_mib, total_whole_us, cap_mib))
    return ranks


def _pack_group(
    group: FillerGroup, loads_us: list[int], memory_mib: list[int], total_us: int, cap_mib: int
) -> dict[int, int]:
    """Within a group only the chosen rank's score changes, so a heap gives each argmax of Eq. (8) in log
    N."""
    world = len(loads_us)

    def score(rank: int) -> int:
        time_slack = (total_us - world * (loads_us[rank] + group.price_us)) * cap_mib  # rho^C
        memory_slack = (cap_mib - memory_mib[rank] - group.memory_mib) * total_us  # rho^M
        return min(time_slack, memory_slack)

    def fits(rank: int) -> bool:
        return cap_mib - memory_mib[rank] >= group.memory_mib  # R_s

    heap = [(-score(rank), rank) for rank in range(world) if fits(rank)]
    heapq.heapify(heap)
    placed: dict[int, int] = {}
    for member in group.members:
        if not heap:
            raise FillerOverflowError(member, group.memory_mib, cap_mib - min(memory_mib))
        rank = heap[0][1]
        placed[member] = rank
        loads_us[rank] += group.price_us
        memory_mib[rank] += group.memory_mib
        if fits(rank):
            heapq.heapreplace(heap, (-score(rank), rank))
        else:
            heapq.heappop(heap)
    return placed
