"""AdaptiveLoad's sampler form: every sample once, shares of one bucket, sizes by memory and compute."""

from __future__ import annotations

from typing import Any

import pytest

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement import Bucket, Catalog
from zellige_lightning.sources import Sample
from zellige_lightning.sources.adaptive_load import AdaptiveLoad, AdaptiveLoadSampler

SMALL, LARGE, VIDEO = Bucket("small", (1, 5, 5)), Bucket("large", (1, 10, 10)), Bucket("video", (4, 10, 10))
CATALOG = Catalog((SMALL, LARGE, VIDEO))


def make_sampler(exponent: float = 1.5, ranks: int = 4, tokens_per_batch: int = 2000) -> AdaptiveLoadSampler:
    counts = {SMALL: 130, LARGE: 40, VIDEO: 11}
    samples = [Sample(f"{b.name}-{i}", b.grid) for b, n in counts.items() for i in range(n)]
    settings = AdaptiveLoad(exponent, ranks)
    return AdaptiveLoadSampler(samples, CATALOG, settings, tokens_per_batch=tokens_per_batch, seed=5)


@pytest.mark.parametrize(
    ("exponent", "tokens_per_batch", "sizes"),
    [
        (1.5, 100_000, {"small": 64, "large": 8, "video": 1}),  # compute: 16^1.5, 4^1.5, 1
        (1.0, 100_000, {"small": 16, "large": 4, "video": 1}),  # equal tokens
        (1.5, 2_000, {"small": 20, "large": 5, "video": 1}),  # memory: 500 tokens per rank
        (1.5, 400, {"small": 4, "large": 1, "video": 1}),  # a video that does not fit is drawn all the same
    ],
)
def test_sizes_by_memory_and_compute(exponent: float, tokens_per_batch: int, sizes: dict[str, int]) -> None:
    assert make_sampler(exponent, tokens_per_batch=tokens_per_batch).batch_sizes == sizes


def test_every_sample_once_in_shares_of_one_bucket() -> None:
    """130 small ones in shares of 20, 40 large in shares of 5, 11 videos: 7 + 8 + 11 shares, 4 per batch."""
    sampler = make_sampler()
    assert sampler.num_batches == 7
    for epoch in range(5):
        batches = sampler.deal(epoch)
        keys = [key for batch in batches for key, _ in batch]
        assert len(keys) == len(set(keys)) == 181
        assert len(batches) == sampler.num_batches
        for batch in batches:
            shares = sum(-(-_count(batch, b) // sampler.batch_sizes[b.name]) for b in CATALOG)
            assert shares <= 4


def _count(batch: list[tuple[str, Bucket]], bucket: Bucket) -> int:
    return sum(b == bucket for _, b in batch)


def test_all_ranks_deal_alike_and_epochs_differ() -> None:
    one, other = make_sampler(), make_sampler()
    assert one.deal(3) == other.deal(3) == one.deal(3) != one.deal(2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"exponent": 1.5}, "has the settings"),
        ({"exponent": 1.5, "ranks": 2, "rank": 2}, "has the settings"),
        ({"exponent": 0, "ranks": 2}, "exponent=0"),
        ({"exponent": "1.5", "ranks": 2}, "exponent='1.5'"),
        ({"exponent": 1.5, "ranks": 0}, "ranks=0"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        AdaptiveLoad.of(settings)
