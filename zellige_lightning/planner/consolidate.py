"""The last objective: fewer distinct rank sets for the same makespan and splits."""

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
