"""Packing of sand: whole light sequences into the room that rocks leave, by Eq. (8) with a target T for F."""

from __future__ import annotations

from typing import Any

from zellige_lightning.planner.compiled import compiled


@compiled
def takes(score: int, target: int, cap: int, load: int, mem: int, price: int, mib: int, most: int) -> int:
    """How many members one rank takes while Eq. (8)'s score min(time slack * cap, memory slack * T) of each is
    >= `score`, and memory suffices. Scores of one rank only fall, so this is a closed form."""
    count = most
    if price > 0:
        count = min(count, (target - load - -((-score) // cap)) // price)
    if mib > 0:
        count = min(count, (cap - mem - -((-score) // target)) // mib)
        count = min(count, (cap - mem) // mib)
    elif (cap - mem) * target < score:
        count = 0
    return max(0, count)


@compiled
def pack_group(
    count: int, price: int, mib: int, target: int, cap: int, num_ranks: int, loads: Any, mems: Any, took: Any
) -> bool:
    """Places `count` equal sequences exactly as Eq. (8) would one after another (ties: lowest rank): within a
    group Eq. (8) takes the `count` largest scores of all ranks. Writes `took[r]`; False where memory is short.
    """
    low, high = -(1 << 61), 1 << 61
    while high - low > 1:  # largest score that still gives room for all
        middle = (low + high) >> 1
        total = 0
        for r in range(num_ranks):
            total += takes(middle, target, cap, loads[r], mems[r], price, mib, count)
        if total >= count:
            low = middle
        else:
            high = middle
    placed = 0
    for r in range(num_ranks):
        took[r] = takes(high, target, cap, loads[r], mems[r], price, mib, count)
        placed += took[r]
    for r in range(num_ranks):  # the last ones all score `low`
        more = takes(low, target, cap, loads[r], mems[r], price, mib, count) - took[r]
        more = min(more, count - placed)
        took[r] += more
        placed += more
    for r in range(num_ranks):
        loads[r] += took[r] * price
        mems[r] += took[r] * mib
    return placed == count


@compiled
def exchange(excess: int, missing_mib: int, price: int, back_price: int, back_mib: int) -> int:
    """How many lighter sequences come back for one heavy one: as many as the other rank's memory asks for, and
    as many as bring the two loads, `excess` apart, closest together."""
    count = 0
    if missing_mib > 0 and back_mib > 0:
        count = -(-missing_mib // back_mib)
    if back_price > 0:
        count = max(count, (2 * price - excess) // (2 * back_price))
    return count


@compiled
def relieve(
    limit: int,
    cap: int,
    num_groups: int,
    num_ranks: int,
    price: Any,
    mib: Any,
    loads: Any,
    mems: Any,
    took: Any,
) -> int:
    """Moves of sand from the fullest rank, also in exchange for lighter ones, until every load is <= `limit` or nothing helps.

    Args:
        price, mib: [G] of one member of each sand group.
        took: [G*N] members of a group on a rank; changed in place like `loads` and `mems`.

    Returns the largest load. Every step lowers the fullest rank without making another one as full.
    """
    while True:
        full = 0
        for r in range(num_ranks):
            if loads[r] > loads[full]:
                full = r
        if loads[full] <= limit:
            return loads[full]
        best, best_g, best_h, best_n, best_r = loads[full], -1, -1, 0, -1
        for g in range(num_groups):
            if took[g * num_ranks + full] == 0:
                continue
            for h in range(-1, num_groups):  # -1: nothing comes back
                if h == g:
                    continue
                for r in range(num_ranks):
                    if r == full or loads[r] >= loads[full]:
                        continue
                    back = 0
                    if h >= 0:
                        back = exchange(
                            loads[full] - loads[r], mems[r] + mib[g] - cap, price[g], price[h], mib[h]
                        )
                        if took[h * num_ranks + r] < back or back == 0:
                            continue
                    gain, gain_mib = price[g], mib[g]
                    if h >= 0:
                        gain -= back * price[h]
                        gain_mib -= back * mib[h]
                    if gain <= 0 or mems[r] + gain_mib > cap or mems[full] - gain_mib > cap:
                        continue
                    worst = max(loads[full] - gain, loads[r] + gain)
                    if worst < best:
                        best, best_g, best_h, best_n, best_r = worst, g, h, back, r
        if best_g < 0:
            return loads[full]
        took[best_g * num_ranks + full] -= 1
        took[best_g * num_ranks + best_r] += 1
        gain, gain_mib = price[best_g], mib[best_g]
        if best_h >= 0:
            took[best_h * num_ranks + full] += best_n
            took[best_h * num_ranks + best_r] -= best_n
            gain -= best_n * price[best_h]
            gain_mib -= best_n * mib[best_h]
        loads[full] -= gain
        mems[full] -= gain_mib
        loads[best_r] += gain
        mems[best_r] += gain_mib
