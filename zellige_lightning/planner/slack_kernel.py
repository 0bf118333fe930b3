"""Greedy placement of rocks by what it leaves: no backtracking, but every choice and rank set is weighed."""

from __future__ import annotations

from typing import Any

from zellige_lightning.planner.compiled import compiled
from zellige_lightning.planner.search_kernel import fill_needs, ordinary, weight

SCALE = 1 << 20


@compiled
def place_by_slack(
    limit: int, cap: int, sizes: Any, item_group: Any, counts: Any, choice_ptr: Any, degree: Any, price: Any,
    work: Any, memory: Any, set_ptr: Any, set_choice: Any, set_ranks: Any, ranks: Any, slow: Any, ratios: Any,
    group_need: Any, need: Any, forced: Any, least: Any, loads: Any, mems: Any, picks: Any, room: Any,
) -> bool:  # fmt: skip
    """Places the rocks, heaviest first, each where the scarcest necessary condition keeps the most slack.

    The slack of condition c is what the ranks still offer minus what is still to come, relative to what they
    offered when empty. A split costs area, which is time slack; a whole giant may leave a rank with time
    and no memory to fill it, which is slack of a mixed condition: so degrees are mixed as both run out
        together.

    Args: as in `decide`; `room` is [2Q] scratch.

    Returns whether all rocks are placed; `picks`, `loads` and `mems` hold them.
    """
    num_ranks, num_items, num_ratios = sizes[0], sizes[1], sizes[3]
    for r in range(num_ranks):
        loads[r] = 0
        mems[r] = 0
    if not fill_needs(
        limit, cap, sizes, item_group, counts, choice_ptr, degree, price, work, memory, ratios, group_need,
        need, forced, least,
    ):  # fmt: skip
        return False
    for c in range(num_ratios):
        room[c] = 0
        for r in range(num_ranks):
            room[c] += weight(ordinary(limit, slow[r]), cap, ratios[2 * c], ratios[2 * c + 1])
        room[num_ratios + c] = max(1, room[c] // SCALE)
    for i in range(num_items):
        g = item_group[i]
        best, best_even, chosen = -1, -1, -1
        for s in range(set_ptr[choice_ptr[g]], set_ptr[choice_ptr[g + 1]]):
            j = set_choice[s]
            even = limit * cap
            for x in range(set_ranks[s], set_ranks[s + 1]):
                r = ranks[x]
                even = min(even, (limit - loads[r] - price[j]) * cap, (cap - mems[r] - memory[j]) * limit)
            if even < 0:
                continue
            score = SCALE * SCALE
            for c in range(num_ratios):
                a, b = ratios[2 * c], ratios[2 * c + 1]
                slack = room[c] - need[(i + 1) * num_ratios + c]
                for x in range(set_ranks[s], set_ranks[s + 1]):
                    r = ranks[x]
                    time_left, left = limit - loads[r], cap - mems[r]
                    slack += weight(ordinary(time_left - price[j], slow[r]), left - memory[j], a, b)
                    slack -= weight(ordinary(time_left, slow[r]), left, a, b)
                score = min(score, slack // room[num_ratios + c])
                if score < best:
                    break
            if score > best or (score == best and even > best_even):
                best, best_even, chosen = score, even, s
        if chosen < 0:
            return False
        j = set_choice[chosen]
        picks[i] = chosen
        for x in range(set_ranks[chosen], set_ranks[chosen + 1]):
            r = ranks[x]
            time_left, left = limit - loads[r], cap - mems[r]
            for c in range(num_ratios):
                a, b = ratios[2 * c], ratios[2 * c + 1]
                room[c] += weight(ordinary(time_left - price[j], slow[r]), left - memory[j], a, b)
                room[c] -= weight(ordinary(time_left, slow[r]), left, a, b)
            loads[r] += price[j]
            mems[r] += memory[j]
    return True
