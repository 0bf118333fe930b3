"""Lower bounds of the makespan that hold for every placement, and hence for every planner."""

from __future__ import annotations

from zellige_lightning.planner.problem import PlacementProblem


def area_bound(problem: PlacementProblem) -> int:
    """All rank time that must be spent, spread evenly, rounded up (microseconds).

    A sequence takes at least min over its options of degree * price, which also holds where a split is
    cheaper in total than the whole sequence.
    """
    area = sum(len(group) * min(c.area_us for c in group.choices) for group in problem.groups)
    return -(-area // problem.world_size)


def largest_bound(problem: PlacementProblem) -> int:
    """Some rank works for the min-price option of the sequence where that is largest (microseconds)."""
    return max((min(c.price_us for c in group.choices) for group in problem.groups), default=0)


def lower_bound(problem: PlacementProblem) -> tuple[int, str]:
    """The better of both bounds, and its name."""
    return max((area_bound(problem), "area"), (largest_bound(problem), "largest sequence"))
