"""The last objectives: fewer distinct rank sets, then fewer bytes, for the same makespan and splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from zellige_lightning.planner.problem import Cell, PlacementProblem, RankSet
from zellige_lightning.planner.solution import Account, Key


def consolidate(problem: PlacementProblem, cells: Iterable[Cell], limit: int) -> tuple[Cell, ...]:
    """Moves split sequences onto rank sets that others use already, while every load stays <= `limit` and
    memory under the cap. Fewer rank sets mean fewer process groups and larger coalesced blocks. Greedy,
    rarest first."""
    account = Account(problem, cells)
    uses: Counter[RankSet] = Counter()
    for (_, _, ranks), count in account.counts.items():
        if len(ranks) > 1:
            uses[ranks] += count
    for old in sorted(uses, key=lambda s: (uses[s], s)):
        for new in sorted((s for s in uses if uses[s] and s != old), key=lambda s: (-uses[s], s)):
            if _may_stand_for(account, old, new):
                moved = {key: (key[0], key[1], new) for key in account.counts if key[2] == old}
                if try_move(account, moved, limit):
                    uses[new] += uses.pop(old)
                    break
    return account.cells


def _may_stand_for(account: Account, old: RankSet, new: RankSet) -> bool:
    """Whether whatever is on `old` may go to `new`."""
    if len(old) != len(new):
        return False
    return all(new in account.choice(key).rank_sets for key in account.counts if key[2] == old)


def try_move(account: Account, moved: Mapping[Key, Key], limit: int) -> bool:
    """All sequences of each key to another one, if no rank that takes more ends above `limit` or the cap.
    False where one would, and nothing is moved."""
    counts = {old: account.counts[old] for old in moved}
    loads, memory = list(account.loads_us), list(account.memory_mib)
    for old, count in counts.items():
        account.add(old, -count)
        account.add(moved[old], count)
    for r, (load, held) in enumerate(zip(account.loads_us, account.memory_mib, strict=True)):
        if load > max(limit, loads[r]) or held > max(account.problem.cap_mib, memory[r]):
            for old, count in counts.items():
                account.add(moved[old], -count)
                account.add(old, count)
            return False
    return True


def spare_links(problem: PlacementProblem, cells: Iterable[Cell], limit: int) -> tuple[Cell, ...]:
    """Moves split sequences to choices and rank sets that exchange fewer bytes, while every load stays <=
    `limit`, memory under the cap, and no more rank sets are used. Greedy, the most bytes first, until nothing
    helps."""
    account = Account(problem, cells)
    while any(_lighten(account, key, limit) for key in _most_bytes_first(account)):
        pass
    return account.cells


def _most_bytes_first(account: Account) -> list[Key]:
    split = (key for key in account.counts if len(key[2]) > 1)
    return sorted(split, key=lambda key: (-account.choice(key).traffic, key))


def _lighten(account: Account, key: Key, limit: int) -> bool:
    """Moves all members of a cell to the split choice with the fewest bytes that may be taken, if any."""
    group, old = account.problem.groups[key[0]], account.choice(key)
    used = {ranks for _, _, ranks in account.counts if len(ranks) > 1}
    is_alone = (
        sum(ranks == key[2] for _, _, ranks in account.counts) == 1
    )  # its rank set goes where it leaves
    for j in sorted(range(len(group.choices)), key=lambda j: (group.choices[j].traffic, j)):
        choice = group.choices[j]
        if choice.traffic >= old.traffic:
            return False
        if choice.config.is_whole:
            continue
        for ranks in choice.rank_sets:
            if (is_alone or ranks in used) and try_move(account, {key: (key[0], j, ranks)}, limit):
                return True
    return False
