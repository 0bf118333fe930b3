"""Both theorems by enumeration, and the enumeration itself against plain loops."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import product

import pytest

from zellige_lightning.simulator.theorems import (
    check_theorem_1,
    check_theorem_2,
    disjoint_optimum,
    proportional_packing,
)


def test_theorem_1_holds_and_its_bound_is_attained() -> None:
    found = check_theorem_1(400)
    assert found.violations == 0
    assert found.attained > 40  # the upper bound N / g_max
    assert 100 < found.balanced < 390  # Gamma = 1 happens, and does not always


@pytest.mark.slow
def test_theorem_1_on_ten_thousand_cases() -> None:
    assert check_theorem_1(10_000, seed=1).violations == 0


@pytest.mark.parametrize(("ranks", "fillers"), [(2, 1), (2, 4), (3, 2), (4, 2)])
def test_theorem_2_by_search(ranks: int, fillers: int) -> None:
    found = check_theorem_2(ranks, fillers)
    assert (found.disjoint_splits, found.joint_splits) == (ranks * fillers + 1, 1)
    assert found.holds


def test_the_enumeration_is_exhaustive() -> None:
    rng = random.Random(0)
    for _ in range(60):
        sizes = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
        work = [rng.randint(1, 20) for _ in range(rng.randint(1, 5))]
        loads = []
        for assignment in product(range(len(sizes)), repeat=len(work)):
            sums = [
                sum(w for w, j in zip(work, assignment, strict=True) if j == i) for i in range(len(sizes))
            ]
            loads.append(max(Fraction(s, g) for s, g in zip(sums, sizes, strict=True)))
        assert disjoint_optimum(work, sizes) == min(loads)
        assert proportional_packing(work, sizes) == (min(loads) == Fraction(sum(work), sum(sizes)))
