"""The catalog cut: which buckets are anchors and which are fillers (paper, Eq. (4))."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from zellige_lightning.placement.sequence import Bucket
from zellige_lightning.planner.cost import ProfileTable

_TIE = 1e-12  # dispersions this close are a tie, so that rescaling all prices cannot flip the cut by rounding


def cut_index(whole_us: Sequence[int]) -> int:
    """k* of Eq. (4) for ascending whole-sequence prices: the first k* buckets are fillers.

    Ties take the smallest k. A cut between two equal prices is not considered: buckets of one price stay
    on one side. With a single distinct price (a one-bucket catalog) Eq. (4) has no cut; then k* = 0, every
    bucket is an anchor, because an anchor may still be kept whole while a filler could never be split.
    """
    logs = [log(w) for w in whole_us]
    best_k, best = 0, float("inf")
    for k in range(1, len(logs)):
        if whole_us[k - 1] == whole_us[k]:
            continue
        dispersion = _dispersion(logs[:k]) + _dispersion(logs[k:])
        if dispersion < best - _TIE:
            best_k, best = k, dispersion
    return best_k


def _dispersion(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((v - mean) ** 2 for v in values)


@dataclass(frozen=True)
class CatalogCut:
    """Eq. (4) applied: a bucket is an anchor iff its whole-sequence price is above `threshold_us`.

    Comparing prices gives the catalog's own buckets the side that Eq. (4) says, and places ad-hoc buckets
    too.
    """

    threshold_us: int

    @classmethod
    def of_table(cls, table: ProfileTable) -> CatalogCut:
        """The cut of a profiled catalog; it does not depend on any batch."""
        prices = sorted(table.whole_us(bucket) for bucket in table.buckets)
        k = cut_index(prices)
        return cls(prices[k - 1] if k else 0)

    def is_anchor(self, table: ProfileTable, bucket: Bucket) -> bool:
        return table.whole_us(bucket) > self.threshold_us
