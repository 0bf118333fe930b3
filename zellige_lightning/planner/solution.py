"""What every planner and policy returns for a problem, and what it is told besides the problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.problem import Cell, Choice, PlacementProblem, RankSet

if TYPE_CHECKING:
    from zellige_lightning.planner.planner import PlannerConfig

Key = tuple[int, int, RankSet]  # group, choice and rank set of a cell


@dataclass(frozen=True)
class Brief:
    """Beside the problem.

    Args:
        config: settings of the planner.
        anchors: positions of the groups that Eq. (4) calls anchors.
        whole_us: whole-sequence price of each group, extrapolated where it does not fit whole; for F of
            Eq. (8).
        step: the global batch, for errors.
    """

    config: PlannerConfig
    anchors: frozenset[int]
    whole_us: tuple[int, ...]
    step: int | None = None


@dataclass(frozen=True)
class Solution:
    """A placement as counts, with what was proven about it.

    Args:
        cells: u of Eq. (5).
        bound_us: proven lower bound of the largest load; 0 where the planner proves none of its own.
        bound_source: names the proof.
        statuses: of the balance round and of the split round.
        split_bound: no placement within epsilon of the bound has fewer splits (0 where nothing was proven).
        nodes: search nodes.
    """

    cells: tuple[Cell, ...]
    bound_us: int = 0
    bound_source: str = "none"
    statuses: tuple[str, ...] = ()
    split_bound: int = 0
    nodes: int = 0


class Account:
    """A placement as counts, and Eq. (6) of it: load (us) and memory (MiB) of every rank. A block (the
    sequences of one configuration and rank set) pays its start once.

    Attributes:
        counts: of every (group, choice, rank set), in the order in which they came.
    """

    def __init__(self, problem: PlacementProblem, cells: Iterable[Cell] = ()) -> None:
        self.problem = problem
        self.loads_us, self.memory_mib = [0] * problem.world_size, [0] * problem.world_size
        self.counts: dict[Key, int] = {}
        self._blocks: Counter[tuple[ParallelConfig, RankSet]] = Counter()
        for cell in cells:
            self.add((cell.group, cell.choice, cell.ranks), cell.count)

    @property
    def makespan_us(self) -> int:
        return max(self.loads_us)

    @property
    def fits(self) -> bool:
        return max(self.memory_mib) <= self.problem.cap_mib

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(sorted(Cell(*key, count) for key, count in self.counts.items()))

    def choice(self, key: Key) -> Choice:
        return self.problem.groups[key[0]].choices[key[1]]

    def add(self, key: Key, count: int) -> None:
        """`count` sequences more, or fewer where it is negative."""
        choice, ranks = self.choice(key), key[2]
        time_us = count * choice.price_us
        if choice.start_us:
            block = choice.config, ranks
            before = self._blocks[block]
            self._blocks[block] += count
            time_us += choice.start_us * ((before + count > 0) - (before > 0))
        for rank in ranks:
            self.loads_us[rank] += time_us
            self.memory_mib[rank] += count * choice.memory_mib
        self.counts[key] = self.counts.get(key, 0) + count
        if not self.counts[key]:
            del self.counts[key]


def sums(problem: PlacementProblem, cells: Iterable[Cell]) -> tuple[list[int], list[int]]:
    """Eq. (6) by counts: load (us) and memory (MiB) of every rank."""
    account = Account(problem, cells)
    return account.loads_us, account.memory_mib


def num_splits(cells: Iterable[Cell]) -> int:
    """K of Eq. (6)."""
    return sum(cell.count for cell in cells if len(cell.ranks) > 1)
