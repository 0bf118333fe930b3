"""Packing of sand: whole light sequences into the room that rocks leave, by Eq. (8) with a target T for F.

Shape legend: N ranks, G sand groups; prices are [G*N], since a slow rank takes longer for the same sequence.
"""

from __future__ import annotations

from typing import Any

from zellige_lightning.planner.compiled import compiled

EQ_8, DENSE, MEMORY_ONLY = 0, 1, 2
MOST_GIVEN = 6  # sequences of one group that one exchange may give away
WINDOW = 64  # ranks that are looked at together for an exchange


@compiled
def takes(score: int, target: int, cap: int, load: int, mem: int, price: int, mib: int, most: int) -> int:
    """How many members one rank takes while Eq. (8)'s score min(time slack * cap, memory slack * T) of
    each is >= `score`, and memory suffices. Scores of one rank only fall, so this is a closed form."""
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
    count: int, price: Any, first: int, weighed: int, mib: int, target: int, cap: int, num_ranks: int,
    loads: Any, mems: Any, took: Any,
) -> bool:  # fmt: skip
    """Places `count` equal sequences exactly as Eq. (8) would one after another (ties: lowest rank): within a
    group Eq. (8) takes the `count` largest scores of all ranks. Writes `took[r]`; False where memory is
    short.

    Args:
        price: of one sequence on rank r at `first + r`.
        weighed: 0 places by memory alone, 1 by both.
    """
    low, high = -(1 << 61), 1 << 61
    while high - low > 1:  # largest score that still gives room for all
        middle = (low + high) >> 1
        total = 0
        for r in range(num_ranks):
            time_us = price[first + r] * weighed
            total += takes(middle, target, cap, loads[r], mems[r], time_us, mib, count)
        if total >= count:
            low = middle
        else:
            high = middle
    placed = 0
    for r in range(num_ranks):
        took[r] = takes(high, target, cap, loads[r], mems[r], price[first + r] * weighed, mib, count)
        placed += took[r]
    for r in range(num_ranks):  # the last ones all score `low`
        more = takes(low, target, cap, loads[r], mems[r], price[first + r] * weighed, mib, count)
        more = min(more - took[r], count - placed)
        took[r] += more
        placed += more
    for r in range(num_ranks):
        loads[r] += took[r] * price[first + r]
        mems[r] += took[r] * mib
    return placed == count


@compiled
def exchange(given_us: int, excess: int, missing_mib: int, back_us: int, back_mib: int) -> int:
    """How many lighter sequences come back for heavier ones: as many as the other rank's memory asks for,
    and as many as bring the two loads, `excess` apart, closest together.

    Args:
        given_us, back_us: what the heavier ones, and a lighter one, weigh on both ranks together.
    """
    count = 0
    if missing_mib > 0 and back_mib > 0:
        count = -(-missing_mib // back_mib)
    if back_us > 0:
        count = max(count, (given_us - excess) // back_us)
    return count


@compiled
def find_relief(
    full: int, first: int, cap: int, num_groups: int, num_ranks: int, price: Any, mib: Any, loads: Any,
    mems: Any, took: Any, move: Any,
) -> bool:  # fmt: skip
    """The exchange between rank `full` and one of the `WINDOW` ranks from `first` on that leaves the larger
    of their loads smallest. Writes `move` = (group given, number, group that comes back or -1, number, other
    rank); False if none helps."""
    best, found = loads[full], False
    for g in range(num_groups):
        for n in range(1, min(MOST_GIVEN, took[g * num_ranks + full]) + 1):
            for h in range(-1, num_groups):  # -1: nothing comes back
                if h == g or (h < 0 and n > 1):
                    continue
                for x in range(min(WINDOW, num_ranks)):
                    r = (first + x) % num_ranks
                    if loads[r] >= loads[full]:
                        continue
                    back, gain_mib = 0, n * mib[g]
                    gain, more = n * price[g * num_ranks + full], n * price[g * num_ranks + r]
                    if h >= 0:
                        missing, apart = mems[r] + gain_mib - cap, loads[full] - loads[r]
                        back_us = price[h * num_ranks + full] + price[h * num_ranks + r]
                        back = exchange(gain + more, apart, missing, back_us, mib[h])
                        if back == 0 or took[h * num_ranks + r] < back:
                            continue
                        gain -= back * price[h * num_ranks + full]
                        more -= back * price[h * num_ranks + r]
                        gain_mib -= back * mib[h]
                    if gain <= 0 or mems[r] + gain_mib > cap or mems[full] - gain_mib > cap:
                        continue
                    worst = max(loads[full] - gain, loads[r] + more)
                    if worst < best:
                        best, found = worst, True
                        move[0], move[1], move[2], move[3], move[4] = g, n, h, back, r
    return found


@compiled
def relieve(
    limit: int, cap: int, num_groups: int, num_ranks: int, price: Any, mib: Any, loads: Any, mems: Any,
    took: Any, move: Any,
) -> int:  # fmt: skip
    """Moves sand from the fullest rank, also in exchange for lighter one, until every load is <= `limit` or
    nothing helps. Returns the largest load.

    Args:
        price, mib: [G*N] and [G] of one member of each sand group.
        took: [G*N] members of a group on a rank; changed in place like `loads` and `mems`.

    Every step lowers the fullest rank without making another one as full, so it ends. In large worlds the
    first window of ranks that has an exchange is taken, and the next step begins there.
    """
    first = 0
    while True:
        full = 0
        for r in range(num_ranks):
            if loads[r] > loads[full]:
                full = r
        found, seen = False, 0
        while loads[full] > limit and not found and seen < num_ranks:
            found = find_relief(full, first, cap, num_groups, num_ranks, price, mib, loads, mems, took, move)
            seen += WINDOW
            if num_ranks > WINDOW:
                first = (first + WINDOW) % num_ranks
        if not found:
            return loads[full]
        g, n, h, back, r = move[0], move[1], move[2], move[3], move[4]
        gain_mib = n * mib[g]
        gain, more = n * price[g * num_ranks + full], n * price[g * num_ranks + r]
        took[g * num_ranks + full] -= n
        took[g * num_ranks + r] += n
        if h >= 0:
            took[h * num_ranks + full] += back
            took[h * num_ranks + r] -= back
            gain -= back * price[h * num_ranks + full]
            more -= back * price[h * num_ranks + r]
            gain_mib -= back * mib[h]
        loads[full] -= gain
        mems[full] -= gain_mib
        loads[r] += more
        mems[r] += gain_mib


@compiled
def pack_dense(
    count: int, price: Any, first: int, mib: int, target: int, cap: int, num_ranks: int, loads: Any,
    mems: Any, row: Any,
) -> bool:  # fmt: skip
    """Places equal sequences one by one where the most time must go into the least memory: the rank with the
    largest (target - load) / (cap - memory), ties lowest rank; the least loaded rank where no time is left.

    For groups by decreasing time per memory, so that ranks short of memory get the densest sequences.
    """
    for _ in range(count):
        chosen, in_time = -1, False
        for r in range(num_ranks):
            if mems[r] + mib > cap:
                continue
            fits = loads[r] + price[first + r] <= target
            if chosen < 0 or (fits and not in_time):
                chosen, in_time = r, fits
            elif fits:
                here = (target - loads[r]) * (cap - mems[chosen])
                if here > (target - loads[chosen]) * (cap - mems[r]):
                    chosen = r
            elif not in_time and loads[r] + price[first + r] < loads[chosen] + price[first + chosen]:
                chosen = r
        if chosen < 0:
            return False
        row[chosen] += 1
        loads[chosen] += price[first + chosen]
        mems[chosen] += mib
    return True


@compiled
def pack_sand(
    style: int, order: Any, counts: Any, price: Any, mib: Any, limit: int, cap: int, num_groups: int,
    num_ranks: int, loads: Any, mems: Any, took: Any, row: Any, move: Any,
) -> int:  # fmt: skip
    """Packs all sand groups in `order` and relieves the fullest ranks.

    Args:
        style: EQ_8, DENSE, or MEMORY_ONLY, which balances memory and leaves time to the relief.
        loads, mems: of the rocks; of everything afterwards.
        took: [G*N] out: members of a group on a rank.
        row: [N] scratch.

    Returns the largest load, or -1 where memory is short.
    """
    for x in range(num_groups * num_ranks):
        took[x] = 0
    for n in range(num_groups):
        g = order[n]
        first = g * num_ranks
        for r in range(num_ranks):
            row[r] = 0
        if style == DENSE:
            done = pack_dense(counts[g], price, first, mib[g], limit, cap, num_ranks, loads, mems, row)
        else:
            weighed = 0 if style == MEMORY_ONLY else 1
            done = pack_group(
                counts[g], price, first, weighed, mib[g], limit, cap, num_ranks, loads, mems, row
            )
        if not done:
            return -1
        for r in range(num_ranks):
            took[first + r] = row[r]
    return relieve(limit, cap, num_groups, num_ranks, price, mib, loads, mems, took, move)
