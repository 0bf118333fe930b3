"""Theorems 1 and 2 of the paper, by exact enumeration in its ideal compute-only model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations_with_replacement, pairwise

from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.exact import solve_exact
from zellige_lightning.planner.planner import PlannerConfig
from zellige_lightning.planner.policies.knapformer import partitions
from zellige_lightning.planner.problem import Choice, Group, PlacementProblem
from zellige_lightning.planner.solution import Brief, num_splits, sums


def disjoint_optimum(work: Sequence[int], sizes: Sequence[int]) -> Fraction:
    """Eq. (2): the least largest load per rank over all assignments of sequences to groups."""
    states = {(0,) * len(sizes)}
    for w in sorted(work, reverse=True):
        states = {
            _canonical((*s[:j], s[j] + w, *s[j + 1 :]), sizes) for s in states for j in range(len(sizes))
        }
    return min(max(Fraction(load, g) for load, g in zip(s, sizes, strict=True)) for s in states)


def _canonical(loads: tuple[int, ...], sizes: Sequence[int]) -> tuple[int, ...]:
    """Groups of one size are interchangeable."""
    pairs = sorted(zip(sizes, loads, strict=True))
    order = sorted(range(len(sizes)), key=lambda j: sizes[j])
    placed = dict(zip(order, (load for _, load in pairs), strict=True))
    return tuple(placed[j] for j in range(len(sizes)))


def proportional_packing(work: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether some assignment gives each group exactly g W / N. Shares no step with `disjoint_optimum`."""
    total, ranks = sum(work), sum(sizes)
    if any(g * total % ranks for g in sizes):
        return False
    room = [g * total // ranks for g in sizes]

    def fill(i: int) -> bool:
        if i == len(work):
            return not any(room)
        for j in range(len(room)):
            if room[j] >= work[i] and room[j] not in room[:j]:
                room[j] -= work[i]
                if fill(i + 1):
                    return True
                room[j] += work[i]
        return False

    return fill(0)


@dataclass(frozen=True)
class Theorem1:
    """How often its statements failed, and what was met on the way.

    Args:
        attained: cases in which the upper bound N / g_max was reached.
        balanced: cases with Gamma = 1.
    """

    cases: int
    violations: int
    attained: int
    balanced: int


def check_theorem_1(num_cases: int, seed: int = 0) -> Theorem1:
    """Bounds of Eq. (3), attainment of N / g_max by one sequence, and Gamma = 1 exactly where a
    proportional packing exists, on random works and layouts."""
    rng, violations, attained, balanced = random.Random(seed), 0, 0, 0
    for _ in range(num_cases):
        ranks = rng.randint(2, 8)
        sizes = rng.choice(list(partitions(ranks, range(1, ranks + 1))))
        work = _random_work(rng, sizes)
        gamma, upper = _gamma(work, sizes), Fraction(ranks, max(sizes))
        lower = max(Fraction(1), upper * Fraction(max(work), sum(work)))
        wrong = not lower <= gamma <= upper or (gamma == 1) != proportional_packing(work, sizes)
        violations += wrong or _gamma([rng.randint(1, 99)], sizes) != upper
        attained += gamma == upper
        balanced += gamma == 1
    return Theorem1(num_cases, violations, attained, balanced)


def _gamma(work: Sequence[int], sizes: Sequence[int]) -> Fraction:
    """Gamma(w, G) = N T*_disj / W."""
    return sum(sizes) * disjoint_optimum(work, sizes) / sum(work)


def _random_work(rng: random.Random, sizes: Sequence[int]) -> list[int]:
    """Up to seven sequences: skewed, small equal ones, or one that packs proportionally by construction."""
    kind, count = rng.randrange(3), rng.randint(1, 7)
    if kind == 0:
        return [max(1, round(rng.lognormvariate(3.0, 1.5))) for _ in range(count)]
    if kind == 1:
        return [rng.randint(1, 4) for _ in range(count)]
    unit, work = rng.randint(1, 6), list[int]()
    for g in sizes:
        parts = sorted(rng.sample(range(1, g * unit), min(g * unit - 1, rng.randint(0, 2))))
        work += [b - a for a, b in zip([0, *parts], [*parts, g * unit], strict=True)]
    return work[:9] if len(work) <= 9 else [unit * g for g in sizes]


@dataclass(frozen=True)
class Theorem2:
    """Fewest splits at makespan F, found by search: over every disjoint layout, and jointly."""

    ranks: int
    fillers: int
    disjoint_splits: int
    joint_splits: int

    @property
    def holds(self) -> bool:
        return (self.disjoint_splits, self.joint_splits) == (self.fillers + 1, 1)


def check_theorem_2(ranks: int, fillers_per_rank: int) -> Theorem2:
    """One giant of work N u and N p fillers of work delta, with u > (N - 1) p delta, as the theorem takes
    them."""
    unit = _factorial(ranks)  # so that every split divides evenly
    delta, fillers = unit, ranks * fillers_per_rank
    giant = ranks * ((ranks - 1) * fillers_per_rank + 1) * delta
    floor = (giant + fillers * delta) // ranks
    disjoint = min(_splits_of_layouts(giant, delta, fillers, ranks, floor))
    return Theorem2(ranks, fillers, disjoint, _joint_splits(giant, delta, fillers, ranks, floor))


def _factorial(n: int) -> int:
    return n * _factorial(n - 1) if n > 1 else 1


def _splits_of_layouts(giant: int, delta: int, fillers: int, ranks: int, floor: int) -> Iterator[int]:
    """Split counts of all disjoint placements with makespan `floor`."""
    for sizes in partitions(ranks, range(1, ranks + 1)):
        for home in range(len(sizes)):
            for counts in _deals(fillers, len(sizes)):
                loads = [c * delta + (giant if j == home else 0) for j, c in enumerate(counts)]
                if all(load <= g * floor for load, g in zip(loads, sizes, strict=True)):
                    split = sum(c for c, g in zip(counts, sizes, strict=True) if g > 1)
                    yield split + (sizes[home] > 1)


def _deals(count: int, boxes: int) -> Iterator[list[int]]:
    """All ways to put equal things into boxes."""
    for cuts in combinations_with_replacement(range(count + 1), boxes - 1):
        edges = [0, *cuts, count]
        yield [b - a for a, b in pairwise(edges)]


def _joint_splits(giant: int, delta: int, fillers: int, ranks: int, floor: int) -> int:
    """The certified fewest splits of the joint search; -1 where it is not certified at `floor`."""
    problem = PlacementProblem(
        ranks,
        1,
        (_group("giant", giant, range(1), ranks), _group("filler", delta, range(1, fillers + 1), ranks)),
    )
    brief = Brief(PlannerConfig(name="exact", epsilon=0.0), frozenset({0}), (giant, delta))
    solution = solve_exact(problem, brief)
    makespan, splits = max(sums(problem, solution.cells)[0]), num_splits(solution.cells)
    certified = makespan == solution.bound_us == floor and splits == solution.split_bound
    return splits if certified else -1


def _group(name: str, work: int, members: range, ranks: int) -> Group:
    """Every degree on every window of ranks, at work / degree."""
    choices = tuple(
        Choice(
            ParallelConfig(1, d, 1), work // d, 0, tuple(tuple(range(s, s + d)) for s in range(ranks - d + 1))
        )
        for d in range(1, ranks + 1)
    )
    return Group(name, tuple(members), choices)
