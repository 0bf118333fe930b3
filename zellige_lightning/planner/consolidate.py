"""The last objectives: fewer distinct rank sets, then fewer bytes, for the same makespan and splits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from zellige_lightning.planner.problem import Cell, PlacementProblem, RankSet
from zellige_lightning.planner.solution import sums


def consolidate(problem: PlacementProblem, cells: Iterable[Cell], limit: int) -> tuple[Cell, ...]:
    """Moves split sequences onto rank sets that others use already, while every load stays <= `limit` and
    memory under the cap. Fewer rank sets mean fewer process groups and larger coalesced blocks. Greedy,
    rarest first."""
    cells = tuple(cells)
    loads, memory = sums(problem, cells)
    counts = {(c.group, c.choice, c.ranks): c.count for c in cells}
    uses = Counter({ranks: 0 for _, _, ranks in counts if len(ranks) > 1})
    for (_, _, ranks), count in counts.items():
        if len(ranks) > 1:
            uses[ranks] += count
    for old in sorted(uses, key=lambda s: (uses[s], s)):
        for new in sorted((s for s in uses if uses[s] and s != old), key=lambda s: (-uses[s], s)):
            if _may_move(problem, counts, old, new, loads, memory, limit):
                for key in [k for k in counts if k[2] == old]:
                    count = counts.pop(key)
                    moved = key[0], key[1], new
                    counts[moved] = counts.get(moved, 0) + count
                uses[new] += uses[old]
                uses[old] = 0
                break
    return tuple(sorted(Cell(*key, count) for key, count in counts.items()))


def _may_move(
    problem: PlacementProblem,
    counts: dict[tuple[int, int, RankSet], int],
    old: RankSet,
    new: RankSet,
    loads: list[int],
    memory: list[int],
    limit: int,
) -> bool:
    """Moves the ledgers if everything on `old` may go to `new`; leaves them otherwise."""
    if len(old) != len(new):
        return False
    time_us, mib = 0, 0
    for (g, j, ranks), count in counts.items():
        if ranks == old:
            choice = problem.groups[g].choices[j]
            if new not in choice.rank_sets:
                return False
            time_us += count * choice.price_us
            mib += count * choice.memory_mib
    arriving = [r for r in new if r not in old]
    if any(loads[r] + time_us > limit or memory[r] + mib > problem.cap_mib for r in arriving):
        return False
    for sign, ranks in ((1, new), (-1, old)):
        for r in ranks:
            loads[r] += sign * time_us
            memory[r] += sign * mib
    return True


def spare_links(problem: PlacementProblem, cells: Iterable[Cell], limit: int) -> tuple[Cell, ...]:
    """Moves split sequences to choices and rank sets that exchange fewer bytes, while every load stays <=
    `limit`, memory under the cap, and no more rank sets are used. Greedy, the most bytes first, until nothing
    helps."""
    cells = tuple(cells)
    loads, memory = sums(problem, cells)
    counts = {(c.group, c.choice, c.ranks): c.count for c in cells}
    moved = True
    while moved:
        moved = False
        for key in sorted(counts, key=lambda k: (-_traffic(problem, k), k)):
            if len(key[2]) > 1 and (better := _lighter(problem, counts, key, loads, memory, limit)):
                count = counts.pop(key)
                _book(problem, key, -count, loads, memory)
                _book(problem, better, count, loads, memory)
                counts[better] = counts.get(better, 0) + count
                moved = True
                break
    return tuple(sorted(Cell(*key, count) for key, count in counts.items()))


Key = tuple[int, int, RankSet]


def _traffic(problem: PlacementProblem, key: Key) -> int:
    return problem.groups[key[0]].choices[key[1]].traffic


def _book(problem: PlacementProblem, key: Key, count: int, loads: list[int], memory: list[int]) -> None:
    choice = problem.groups[key[0]].choices[key[1]]
    for rank in key[2]:
        loads[rank] += count * choice.price_us
        memory[rank] += count * choice.memory_mib


def _lighter(
    problem: PlacementProblem,
    counts: dict[Key, int],
    key: Key,
    loads: list[int],
    memory: list[int],
    limit: int,
) -> Key | None:
    """The split choice with the fewest bytes that all members of a cell may take instead, if any."""
    group, old, count = problem.groups[key[0]], problem.groups[key[0]].choices[key[1]], counts[key]
    used = {ranks for _, _, ranks in counts if len(ranks) > 1}
    is_alone = sum(ranks == key[2] for _, _, ranks in counts) == 1  # its rank set goes where it leaves
    order = sorted(range(len(group.choices)), key=lambda j: (group.choices[j].traffic, j))
    for j in order:
        choice = group.choices[j]
        if choice.traffic >= old.traffic:
            return None
        if choice.config.is_whole:
            continue
        for ranks in choice.rank_sets:
            if not (is_alone or ranks in used):
                continue
            stays = set(ranks) & set(key[2])
            if all(
                loads[r] + count * (choice.price_us - old.price_us * (r in stays)) <= limit
                and memory[r] + count * (choice.memory_mib - old.memory_mib * (r in stays)) <= problem.cap_mib
                for r in ranks
            ):
                return key[0], j, ranks
    return None
