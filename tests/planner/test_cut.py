"""The catalog cut by hand (paper, Eq. (4))."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import given, settings, strategies as st

from tests.planner.toys import BUCKETS, table
from zellige_lightning.placement.sequence import Bucket
from zellige_lightning.planner.cost import ProfileTable
from zellige_lightning.planner.cut import CatalogCut, cut_index


@pytest.mark.parametrize(
    ("prices", "k"),
    [
        ([1, 10], 1),
        ([1, 2, 100], 2),
        ([1, 50, 100], 1),
        ([1, 10, 100], 1),  # both cuts leave the same dispersion: the smallest k
        ([3, 4, 5, 900, 1000, 1100], 3),
        ([7], 0),  # one bucket: no cut, an anchor
        ([7, 7, 7], 0),  # one price: the same
        ([1, 7, 7, 7], 1),
    ],
)
def test_cut_by_hand(prices: list[int], k: int) -> None:
    assert cut_index(prices) == k


@settings(deadline=None)
@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=7), st.integers(2, 1000))
def test_cut_minimises_eq_4_and_ignores_the_unit(prices: list[int], scale: int) -> None:
    prices = sorted(prices)
    k = cut_index(prices)
    assert cut_index([scale * p for p in prices]) == k

    def dispersion(values: list[int]) -> float:
        logs = [log(v) for v in values]
        return sum((x - sum(logs) / len(logs)) ** 2 for x in logs)

    if len(set(prices)) > 1:
        best = min(dispersion(prices[:i]) + dispersion(prices[i:]) for i in range(1, len(prices)))
        assert dispersion(prices[:k]) + dispersion(prices[k:]) == pytest.approx(best, abs=1e-9)


def test_images_are_fillers_and_videos_anchors() -> None:
    prices = table(4)
    cut = CatalogCut.of_table(prices)
    assert [name for name, b in BUCKETS.items() if cut.is_anchor(prices, b)] == ["v480", "v720"]


def test_adhoc_buckets_take_the_side_of_their_price() -> None:
    prices = table(4)
    cut = CatalogCut.of_table(prices)
    assert cut.is_anchor(prices, Bucket("adhoc-long", (60, 45, 80)))
    assert not cut.is_anchor(prices, Bucket("adhoc-small", (1, 20, 20)))


def test_a_one_bucket_catalog_has_only_anchors() -> None:
    prices: ProfileTable = table(4, {"i256": BUCKETS["i256"]})
    assert CatalogCut.of_table(prices).is_anchor(prices, BUCKETS["i256"])
