"""What every planner and policy returns for a problem, and what it is told besides the problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zellige_lightning.planner.problem import Cell, PlacementProblem

if TYPE_CHECKING:
    from zellige_lightning.planner.planner import PlannerConfig


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


def sums(problem: PlacementProblem, cells: Iterable[Cell]) -> tuple[list[int], list[int]]:
    """Eq. (6) by counts: load (us) and memory (MiB) of every rank."""
    loads, memory = [0] * problem.world_size, [0] * problem.world_size
    for cell in cells:
        choice = problem.groups[cell.group].choices[cell.choice]
        for rank in cell.ranks:
            loads[rank] += cell.count * choice.price_us
            memory[rank] += cell.count * choice.memory_mib
    return loads, memory


def num_splits(cells: Iterable[Cell]) -> int:
    """K of Eq. (6)."""
    return sum(cell.count for cell in cells if len(cell.ranks) > 1)
