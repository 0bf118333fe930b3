"""The sand of one problem: light groups that stay whole, packed behind the rocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from zellige_lightning.planner.compiled import as_list, buffer, zeros
from zellige_lightning.planner.problem import Cell, Choice, PlacementProblem
from zellige_lightning.planner.sand_kernel import DENSE, EQ_8, MEMORY_ONLY, pack_sand, relieve
from zellige_lightning.planner.solution import sums

MOST_DENSE = 1 << 17  # ranks x sequences up to which packing one by one is worth its time


@dataclass
class Sand:
    """Buffers for packing; `groups` are positions in `problem.groups`, each with a whole choice."""

    problem: PlacementProblem
    groups: tuple[int, ...]
    makespan_us: int = -1
    _best: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        world, number = self.problem.world_size, max(1, len(self.groups))
        self.choices = [self._wholes(g) for g in self.groups]
        wholes = [choice for _, choice in self.weights]
        counts = [len(self.problem.groups[g]) for g in self.groups]
        places = range(len(self.groups))
        self._orders = {
            EQ_8: buffer(sorted(places, key=lambda n: -wholes[n].price_us)),
            DENSE: buffer(sorted(places, key=lambda n: -wholes[n].price_us / max(1, wholes[n].memory_mib))),
            MEMORY_ONLY: buffer(sorted(places, key=lambda n: -wholes[n].memory_mib)),
        }
        self._styles = (
            [EQ_8, DENSE, MEMORY_ONLY] if world * sum(counts) <= MOST_DENSE else [EQ_8, MEMORY_ONLY]
        )
        self._amounts = (
            buffer(counts or [0]),
            buffer([c.price_us for row in self.choices for _, c in row] or [0]),
            buffer([c.memory_mib for c in wholes] or [0]),
        )
        self._took, self._row, self._move = zeros(number * world), zeros(world), zeros(5)

    def _wholes(self, g: int) -> list[tuple[int, Choice]]:
        """The whole choice of every rank, with its position."""
        group = self.problem.groups[g]
        by_rank = group.whole_by_rank()
        return [(by_rank[r], group.choices[by_rank[r]]) for r in range(self.problem.world_size)]

    @property
    def weights(self) -> list[tuple[int, Choice]]:
        """(count, whole choice on the fastest ranks) of each group."""
        groups = (self.problem.groups[g] for g in self.groups)
        return [(len(group), group.whole) for group in groups if group.whole is not None]

    def pack(self, limit: int, loads: Any, mems: Any) -> bool:
        """Packs behind the rocks' `loads` and `mems`: Eq. (8) with `limit` for F, then styles for tight
        memory until one stays within `limit`. Leaves the ledgers at the rocks. False where memory is short
        in all."""
        world = self.problem.world_size
        rocks = as_list(loads), as_list(mems)
        self.makespan_us = -1
        for style in self._styles:
            if style == MEMORY_ONLY and self.makespan_us >= 0:
                break
            largest = pack_sand(
                style, self._orders[style], *self._amounts, limit, self.problem.cap_mib, len(self.groups),
                world, loads, mems, self._took, self._row, self._move,
            )  # fmt: skip
            for r in range(world):
                loads[r], mems[r] = rocks[0][r], rocks[1][r]
            if largest >= 0 and (self.makespan_us < 0 or largest < self.makespan_us):
                self.makespan_us, self._best = int(largest), as_list(self._took)
            if 0 <= self.makespan_us <= limit:
                break
        return self.makespan_us >= 0

    def cells(self) -> list[Cell]:
        """Counts of the last packing."""
        world = self.problem.world_size
        rows = zip(self.groups, self.choices, strict=True)
        return [
            Cell(g, row[r][0], (r,), count)
            for n, (g, row) in enumerate(rows)
            for r, count in enumerate(self._best[n * world : (n + 1) * world])
            if count
        ]


def conditions(sand: Sequence[tuple[int, Choice]]) -> list[tuple[int, int]]:
    """Weights (a, b) of the necessary conditions: time alone, memory alone, and between them the
    time-to-memory ratio of each sand group and of all sand, where a rank full of light sequences runs out
    of memory first.

    Args:
        sand: (count, whole choice) of each sand group.
    """
    time_us = sum(count * choice.work_us for count, choice in sand)
    memory_mib = sum(count * choice.memory_mib for count, choice in sand)
    pairs = [(choice.work_us, choice.memory_mib) for _, choice in sand[:4]] + [(time_us, memory_mib)]
    mixed = [(1024, max(1, 1024 * time // memory)) for time, memory in pairs if memory > 0]
    return list(dict.fromkeys([(1, 0), (0, 1), *mixed]))


def relieve_ranks(
    problem: PlacementProblem, cells: Iterable[Cell], light: tuple[int, ...], limit: int
) -> tuple[Cell, ...]:
    """The placement with whole sequences of the groups `light` moved off ranks above `limit`, to any rank."""
    world, cells = problem.world_size, tuple(cells)
    if not light:
        return cells
    sand = Sand(problem, light)
    loads, mems = (buffer(row) for row in sums(problem, cells))
    took, rows = zeros(len(light) * world), {g: n for n, g in enumerate(light)}
    wholes = {(g, j) for g, row in zip(light, sand.choices, strict=True) for j, _ in row}
    for cell in cells:
        if (cell.group, cell.choice) in wholes:
            took[rows[cell.group] * world + cell.ranks[0]] += cell.count
    _, price, mib = sand._amounts
    relieve(limit, problem.cap_mib, len(light), world, price, mib, loads, mems, took, zeros(5))
    sand._best = as_list(took)
    kept = [cell for cell in cells if (cell.group, cell.choice) not in wholes]
    return tuple(sorted([*kept, *sand.cells()]))
