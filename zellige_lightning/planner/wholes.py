"""The simplest placement: nothing is split. What a better one has to beat by more than the noise."""

from __future__ import annotations

from zellige_lightning.planner.compiled import zeros
from zellige_lightning.planner.problem import Cell, PlacementProblem
from zellige_lightning.planner.sand import Sand


def all_whole(problem: PlacementProblem, bound_us: int) -> tuple[Cell, ...]:
    """Every sequence whole, packed like sand; empty where one has to be split or memory is short."""
    if any(len(group.whole_by_rank()) < problem.world_size for group in problem.groups):
        return ()
    sand = Sand(problem, tuple(range(len(problem.groups))))
    loads, mems = zeros(problem.world_size), zeros(problem.world_size)
    return tuple(sorted(sand.cells())) if sand.pack(max(1, bound_us), loads, mems) else ()
