"""Depth-first decision: is there a placement with every load <= limit and every memory <= cap?

Rocks are placed one by one; sand (light sequences that stay whole) enters through necessary conditions
only, so an answer of INFEASIBLE holds for every placement of rocks and sand. Buffers are flat and index
with integers alone.

Shape legend: N ranks, I rocks, G groups (rocks and sand), J choices, B rank sets, Q conditions.
"""

from __future__ import annotations

from typing import Any

from zellige_lightning.planner.compiled import compiled
from zellige_lightning.planner.problem import NOMINAL

INFEASIBLE, FEASIBLE, UNKNOWN = 0, 1, 2
HASH_PRIME = 2147483647


@compiled
def weight(time_us: int, memory_mib: int, a: int, b: int) -> int:
    """One condition's size of an amount of work: min(a * time, b * memory); b = 0 is time alone, a = 0
    memory."""
    if b == 0:
        return a * time_us
    if a == 0:
        return b * memory_mib
    return min(a * time_us, b * memory_mib)


@compiled
def ordinary(time_us: int, slowness: int) -> int:
    """Ordinary work that a rank of that slowness (per mille) does at most in `time_us`."""
    return time_us if slowness == NOMINAL else time_us * NOMINAL // slowness


@compiled
def fill_needs(
    limit: int,
    cap: int,
    sizes: Any,
    item_group: Any,
    counts: Any,
    choice_ptr: Any,
    degree: Any,
    price: Any,
    work: Any,
    memory: Any,
    ratios: Any,
    group_need: Any,
    need: Any,
    forced: Any,
    least: Any,
) -> bool:
    """Tables of one decision: `need[i*Q+c]` is what rocks i.. and all sand take at least under condition c
    at ordinary speed, `forced[i]` how many of rocks i.. cannot be whole, `least[i]` the smallest price still
    to come.

    False where some group has no admissible choice.
    """
    num_items, num_groups, num_ratios = sizes[1], sizes[2], sizes[3]
    for c in range(num_ratios):
        need[num_items * num_ratios + c] = 0
    forced[num_items] = 0
    least[num_items] = limit + 1
    for g in range(num_groups):
        whole_fits, smallest, admissible = 0, limit + 1, False
        for c in range(num_ratios):
            group_need[g * num_ratios + c] = -1
        for j in range(choice_ptr[g], choice_ptr[g + 1]):
            if price[j] > limit or memory[j] > cap:
                continue
            admissible = True
            smallest = min(smallest, price[j])
            if degree[j] == 1:
                whole_fits = 1
            for c in range(num_ratios):
                size = degree[j] * weight(work[j], memory[j], ratios[2 * c], ratios[2 * c + 1])
                held = group_need[g * num_ratios + c]
                if held < 0 or size < held:
                    group_need[g * num_ratios + c] = size
        if not admissible:
            return False
        group_need[num_groups * num_ratios + g] = 1 - whole_fits
        group_need[num_groups * num_ratios + num_groups + g] = smallest
        if counts[g] > 0:  # sand
            least[num_items] = min(least[num_items], smallest)
            for c in range(num_ratios):
                need[num_items * num_ratios + c] += counts[g] * group_need[g * num_ratios + c]
    for i in range(num_items - 1, -1, -1):
        g = item_group[i]
        for c in range(num_ratios):
            need[i * num_ratios + c] = need[(i + 1) * num_ratios + c] + group_need[g * num_ratios + c]
        forced[i] = forced[i + 1] + group_need[num_groups * num_ratios + g]
        least[i] = min(least[i + 1], group_need[num_groups * num_ratios + num_groups + g])
    return True


@compiled
def dual(k: int, time_us: int, limit: int) -> int:
    """k-th dual feasible function of bin packing, scaled by k * limit: shards whose times fit one rank add up
    to at most k * limit, yet k + 1 shards of slightly more than limit / (k + 1) each count as more."""
    parts = (k + 1) * time_us
    return k * time_us if parts % limit == 0 else parts // limit * limit


@compiled
def fill_duals(
    limit: int, cap: int, sizes: Any, item_group: Any, counts: Any, choice_ptr: Any, degree: Any, price: Any,
    memory: Any, dual_size: Any, dual_need: Any, dual_spent: Any,
) -> None:  # fmt: skip
    """`dual_size[j*K+k]`: what choice j takes of all ranks under dual k; `dual_need[i*K+k]`: what rocks i..
    and all sand take at least. Few sequences that do not divide evenly are refused by these, not by area."""
    num_items, num_groups, num_duals = sizes[1], sizes[2], sizes[8]
    last = (num_items + 1) * num_duals  # behind it: the least of each group
    for k in range(num_duals):
        dual_spent[k] = 0
        dual_need[num_items * num_duals + k] = 0
        for g in range(num_groups):
            least = -1
            for j in range(choice_ptr[g], choice_ptr[g + 1]):
                if price[j] <= limit and memory[j] <= cap:
                    size = degree[j] * dual(k + 1, price[j], limit)
                    dual_size[j * num_duals + k] = size
                    if least < 0 or size < least:
                        least = size
            dual_need[last + g] = least
            dual_need[num_items * num_duals + k] += counts[g] * least
        for i in range(num_items - 1, -1, -1):
            dual_need[i * num_duals + k] = (
                dual_need[(i + 1) * num_duals + k] + dual_need[last + item_group[i]]
            )


@compiled
def duals_fit(i: int, limit: int, sizes: Any, dual_need: Any, dual_spent: Any) -> bool:
    """Whether what is placed and what is still to come stay below what all ranks offer, under every dual."""
    num_duals = sizes[8]
    for k in range(num_duals):
        if dual_spent[k] + dual_need[i * num_duals + k] > sizes[0] * (k + 1) * limit:
            return False
    return True


@compiled
def has_room(
    i: int,
    limit: int,
    cap: int,
    sizes: Any,
    slow: Any,
    ratios: Any,
    need: Any,
    least: Any,
    loads: Any,
    mems: Any,
) -> bool:
    """The necessary conditions: what is still to come fits the sum over ranks of what is left.

    A rank with less time left than the smallest price to come can take nothing more. What a slow rank has
    left counts as the ordinary time that it is worth: all that it takes costs at least its slowness.
    """
    num_ranks, num_ratios = sizes[0], sizes[3]
    for c in range(num_ratios):
        room = 0
        for r in range(num_ranks):
            if limit - loads[r] >= least[i]:
                left = ordinary(limit - loads[r], slow[r])
                room += weight(left, cap - mems[r], ratios[2 * c], ratios[2 * c + 1])
        if need[i * num_ratios + c] > room:
            return False
    return True


@compiled
def write_key(
    i: int, choice: int, splits: int, sizes: Any, twin: Any, swaps: Any, loads: Any, mems: Any, key: Any
) -> int:
    """Writes the state up to symmetry into `key` and returns its hash (never negative, no overflow).

    Ranks of one twin class may be exchanged, so they are sorted; whole blocks that may be exchanged are
    put in ascending order. Both map a state to an equivalent one, which is all that the memo needs.
    """
    num_ranks, num_swaps = sizes[0], sizes[4]
    key[0], key[1], key[2] = i, choice, splits
    for r in range(num_ranks):
        key[3 + 2 * r], key[4 + 2 * r] = loads[r], mems[r]
    for r in range(1, num_ranks):
        at = r
        for q in range(r - 1, -1, -1):
            if twin[q] == twin[r]:
                if key[3 + 2 * q] < key[3 + 2 * at]:
                    break
                if key[3 + 2 * q] == key[3 + 2 * at] and key[4 + 2 * q] <= key[4 + 2 * at]:
                    break
                key[3 + 2 * q], key[3 + 2 * at] = key[3 + 2 * at], key[3 + 2 * q]
                key[4 + 2 * q], key[4 + 2 * at] = key[4 + 2 * at], key[4 + 2 * q]
                at = q
    changed = num_swaps > 0
    while changed:
        changed = False
        for s in range(num_swaps):
            first, second, length = swaps[3 * s], swaps[3 * s + 1], swaps[3 * s + 2]
            order = 0
            for x in range(2 * length):
                order = key[3 + 2 * first + x] - key[3 + 2 * second + x]
                if order != 0:
                    break
            if order > 0:
                changed = True
                for x in range(2 * length):
                    a, b = 3 + 2 * first + x, 3 + 2 * second + x
                    key[a], key[b] = key[b], key[a]
    value = 17
    for x in range(3 + 2 * num_ranks):
        value = (value * 1000003 + key[x] % HASH_PRIME) % HASH_PRIME
    return value


@compiled
def is_new(value: int, sizes: Any, key: Any, slots: Any, stored: Any, stamps: Any) -> bool:
    """Whether this state was not seen in this decision; remembers it. Whole keys are compared, because a
    state taken for another one would break the proof. A full memo forgets nothing and learns nothing."""
    width, capacity = 3 + 2 * sizes[0], sizes[5]
    place = value % (2 * capacity)
    while slots[2 * place] == stamps[0]:
        row = slots[2 * place + 1] * width
        same = True
        for x in range(width):
            if stored[row + x] != key[x]:
                same = False
                break
        if same:
            return False
        place = (place + 1) % (2 * capacity)
    if stamps[1] < capacity:
        slots[2 * place], slots[2 * place + 1] = stamps[0], stamps[1]
        row = stamps[1] * width
        for x in range(width):
            stored[row + x] = key[x]
        stamps[1] += 1
    return True


@compiled
def fits(
    s: int, time_us: int, mib: int, limit: int, cap: int, set_ranks: Any, ranks: Any, twin: Any,
    loads: Any, mems: Any, mark: Any, symmetry: int,
) -> bool:  # fmt: skip
    """Whether rank set s has room, and is the first of those that rank symmetry makes equal: a chosen rank
    never has an equal, unchosen twin before it."""
    for x in range(set_ranks[s], set_ranks[s + 1]):
        if loads[ranks[x]] + time_us > limit or mems[ranks[x]] + mib > cap:
            return False
    if symmetry == 0:
        return True
    for x in range(set_ranks[s], set_ranks[s + 1]):
        mark[ranks[x]] = 1
    first = True
    for x in range(set_ranks[s], set_ranks[s + 1]):
        r = ranks[x]
        for q in range(r):
            if mark[q] == 0 and twin[q] == twin[r] and loads[q] == loads[r] and mems[q] == mems[r]:
                first = False
    for x in range(set_ranks[s], set_ranks[s + 1]):
        mark[ranks[x]] = 0
    return first


@compiled
def list_sets(
    j: int, start: int, spread: int, limit: int, cap: int, price: Any, memory: Any, set_ptr: Any,
        set_ranks: Any,
    ranks: Any, twin: Any, loads: Any, mems: Any, mark: Any, symmetry: int, candidates: Any, scores: Any,
) -> int:  # fmt: skip
    """Writes the rank sets of choice j that fit to `candidates[start..]`; returns their number.

    With `spread` their scores are the bottleneck slacks of Eq. (8) with `limit` for F, smallest of the set's
    ranks; without it they are all alike.
    """
    count = 0
    for s in range(set_ptr[j], set_ptr[j + 1]):
        if not fits(s, price[j], memory[j], limit, cap, set_ranks, ranks, twin, loads, mems, mark, symmetry):
            continue
        score = 0
        if spread == 1:
            score = limit * cap
            for x in range(set_ranks[s], set_ranks[s + 1]):
                r = ranks[x]
                score = min(score, (limit - loads[r] - price[j]) * cap, (cap - mems[r] - memory[j]) * limit)
        candidates[start + count], scores[start + count] = s, score
        count += 1
    return count


@compiled
def take_best(first: int, last: int, candidates: Any, scores: Any) -> int:
    """Moves the best of candidates first..last-1 to the front (ties: the earliest) and returns it."""
    best = first
    for x in range(first + 1, last):
        if scores[x] > scores[best]:
            best = x
    s, score = candidates[best], scores[best]
    for x in range(best, first, -1):  # the others keep their order
        candidates[x], scores[x] = candidates[x - 1], scores[x - 1]
    candidates[first], scores[first] = s, score
    return s


@compiled
def place(
    sign: int, s: int, j: int, set_ranks: Any, ranks: Any, degree: Any, price: Any, memory: Any, loads: Any,
    mems: Any, num_duals: int, dual_size: Any, dual_spent: Any,
) -> int:  # fmt: skip
    """Puts choice j on rank set s (sign 1), or takes it back (-1); the change in the number of splits."""
    for x in range(set_ranks[s], set_ranks[s + 1]):
        loads[ranks[x]] += sign * price[j]
        mems[ranks[x]] += sign * memory[j]
    for k in range(num_duals):
        dual_spent[k] += sign * dual_size[j * num_duals + k]
    return sign if degree[j] > 1 else 0


@compiled
def decide(
    limit: int,
    budget: int,
    cap: int,
    node_limit: int,
    resume: int,  # 1: go on behind the placement that the last call returned, with its arguments and state
    spread: int,  # 1: try the rank set with the most room left first, 0: the first one
    sizes: Any,  # N, I, G, Q, number of swaps, memo capacity, W (most rank sets of a choice), symmetry on, K
    item_group: Any,  # [I] group of each rock; rocks of a group are neighbours
    counts: Any,  # [G] number of sand members of a group, 0 for groups of rocks
    choice_ptr: Any,  # [G+1] choices of a group, by increasing area
    degree: Any,  # [J]
    price: Any,  # [J]
    work: Any,  # [J] price at ordinary speed
    memory: Any,  # [J]
    set_ptr: Any,  # [J+1] rank sets of a choice
    set_choice: Any,  # [B]
    set_ranks: Any,  # [B+1] ranks of a set
    ranks: Any,
    slow: Any,  # [N] slowness of the ranks, per mille
    twin: Any,  # [N] class of exchangeable ranks
    swaps: Any,  # (first, second, length) of exchangeable blocks
    ratios: Any,  # [2Q] weights (a, b) of the conditions
    group_need: Any,  # [G*Q + 2G]
    need: Any,  # [(I+1)*Q]
    forced: Any,  # [I+1]
    least: Any,  # [I+1]
    loads: Any,  # [N] out: loads of the rocks
    mems: Any,  # [N] out: memory of the rocks
    picks: Any,  # [I+1] out: rank set of each rock
    frames: Any,  # [3(I+1)] choice, position and number of candidates at each depth
    candidates: Any,  # [(I+1)W] rank sets to try at each depth
    scores: Any,  # [(I+1)W]
    mark: Any,  # [N] zeros
    key: Any,  # [3+2N]
    slots: Any,
    stored: Any,
    stamps: Any,  # generation, number of stored states, nodes, splits of the last decision
    dual_size: Any,  # [J*K] K duals, see `fill_duals`
    dual_need: Any,  # [(I+1)*K + G]
    dual_spent: Any,  # [K]
) -> int:
    """FEASIBLE (with `picks`, `loads`, `mems`), INFEASIBLE (proven), or UNKNOWN after `node_limit` nodes.

    At most `budget` rocks are split. Rocks of one group take choices of non-decreasing index: exchanging
    equal sequences changes nothing.
    """
    num_ranks, num_items, width, num_duals = sizes[0], sizes[1], sizes[6], sizes[8]
    i, splits, nodes = 0, 0, stamps[2]
    if resume == 1:
        if num_items == 0:
            return INFEASIBLE
        i, splits = num_items - 1, stamps[3]
        s = picks[i]
        j = set_choice[s]
        splits += place(
            -1, s, j, set_ranks, ranks, degree, price, memory, loads, mems, num_duals, dual_size, dual_spent
        )  # fmt: skip
    else:
        stamps[0] += 1
        stamps[1], stamps[2], nodes = 0, 0, 0
        for r in range(num_ranks):
            loads[r] = 0
            mems[r] = 0
        if not fill_needs(
            limit, cap, sizes, item_group, counts, choice_ptr, degree, price, work, memory, ratios,
            group_need, need, forced, least,
        ):  # fmt: skip
            return INFEASIBLE
        if forced[0] > budget or not has_room(0, limit, cap, sizes, slow, ratios, need, least, loads, mems):
            return INFEASIBLE
        fill_duals(
            limit, cap, sizes, item_group, counts, choice_ptr, degree, price, memory, dual_size, dual_need,
            dual_spent,
        )  # fmt: skip
        if not duals_fit(0, limit, sizes, dual_need, dual_spent):
            return INFEASIBLE
        if num_items == 0:
            return FEASIBLE
        frames[0], frames[1], frames[2] = choice_ptr[item_group[0]] - 1, 0, 0
    while True:
        if frames[3 * i + 1] == frames[3 * i + 2]:  # all rank sets of this choice tried: the next one
            j = frames[3 * i] + 1
            if j == choice_ptr[item_group[i] + 1]:
                if i == 0:
                    return INFEASIBLE
                i -= 1
                s = picks[i]
                j = set_choice[s]
                splits += place(
                    -1, s, j, set_ranks, ranks, degree, price, memory, loads, mems, num_duals, dual_size,
                    dual_spent,
                )  # fmt: skip
                continue
            frames[3 * i], frames[3 * i + 1], frames[3 * i + 2] = j, 0, 0
            if (
                price[j] <= limit
                and memory[j] <= cap
                and (degree[j] == 1 or splits + 1 + forced[i + 1] <= budget)
            ):
                frames[3 * i + 2] = list_sets(
                    j, i * width, spread, limit, cap, price, memory, set_ptr, set_ranks, ranks, twin, loads,
                    mems, mark, sizes[7], candidates, scores,
                )  # fmt: skip
            continue
        j = frames[3 * i]
        s = take_best(i * width + frames[3 * i + 1], i * width + frames[3 * i + 2], candidates, scores)
        frames[3 * i + 1] += 1
        if nodes >= node_limit:
            return UNKNOWN
        nodes += 1
        stamps[2] = nodes
        picks[i] = s
        splits += place(
            1, s, j, set_ranks, ranks, degree, price, memory, loads, mems, num_duals, dual_size, dual_spent
        )  # fmt: skip
        if (
            splits + forced[i + 1] <= budget
            and duals_fit(i + 1, limit, sizes, dual_need, dual_spent)
            and has_room(i + 1, limit, cap, sizes, slow, ratios, need, least, loads, mems)
        ):
            if i + 1 == num_items:
                stamps[3] = splits
                return FEASIBLE
            same = item_group[i + 1] == item_group[i]
            from_choice = j if same else choice_ptr[item_group[i + 1]]
            fresh = True
            if sizes[7] == 1:
                value = write_key(i + 1, from_choice, splits, sizes, twin, swaps, loads, mems, key)
                fresh = is_new(value, sizes, key, slots, stored, stamps)
            if fresh:
                i += 1
                frames[3 * i], frames[3 * i + 1], frames[3 * i + 2] = from_choice - 1, 0, 0
                continue
        splits += place(
            -1, s, j, set_ranks, ranks, degree, price, memory, loads, mems, num_duals, dual_size, dual_spent
        )  # fmt: skip
