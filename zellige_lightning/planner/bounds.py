"""Lower bounds of the makespan that hold for every placement, and hence for every planner."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from zellige_lightning.planner.problem import NOMINAL, Group, PlacementProblem


def area_bound(problem: PlacementProblem) -> int:
    """All rank time that must be spent, spread evenly, rounded up (microseconds).

    A sequence takes at least min over its options of degree * price, which also holds where a split is
    cheaper in total than the whole sequence.
    """
    area = sum(len(group) * min(c.area_us for c in group.choices) for group in problem.groups)
    bound = -(-area // problem.world_size)
    if problem.slowness:  # ranks offer less, or more, than an ordinary one each
        low, high = -1, bound * max(problem.slowness) // NOMINAL + 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if area <= problem.capacity_us(middle) else (middle, high)
        bound = high
    return bound


def area_bound_at(problem: PlacementProblem) -> int:
    """Least T such that all sequences fit N * T with choices whose price is at most T (microseconds).

    Sharper than `area_bound` where a sequence must be split to get below T, which costs area.
    """
    menus = [(len(group), _least_areas(group)) for group in problem.groups]
    low, slowest = largest_bound(problem) - 1, max(problem.slowness_by_rank)
    area = sum(len(g) * max(c.area_us for c in g.choices) for g in problem.groups)
    high = max(low + 1, -(-area * slowest // NOMINAL) + 1)
    while high - low > 1:
        middle = (low + high) // 2
        area = sum(
            count * areas[bisect_right(prices, middle) - 1] for count, (prices, areas) in menus if count
        )
        low, high = (low, middle) if area <= problem.capacity_us(middle) else (middle, high)
    return max(high, 0)


def _least_areas(group: Group) -> tuple[list[int], list[int]]:
    """Prices, ascending, and the least area of choices up to each."""
    choices = sorted(group.choices, key=lambda c: c.price_us)
    return [c.price_us for c in choices], list(accumulate((c.area_us for c in choices), min))


def largest_bound(problem: PlacementProblem) -> int:
    """Some rank works for the min-price option of the sequence where that is largest (microseconds)."""
    return max((min(c.price_us for c in group.choices) for group in problem.groups), default=0)


def lower_bound(problem: PlacementProblem) -> tuple[int, str]:
    """The better of both bounds, and its name."""
    return max((area_bound(problem), "area"), (largest_bound(problem), "largest sequence"))
