"""Global batches of an epoch: every sample once, the same on all ranks, within the budget, in constant
number."""

from __future__ import annotations

import random

import pytest

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.placement import Bucket, Catalog
from zellige_lightning.sources import GlobalBatchSampler, Sample

Dealt = list[list[tuple[str, Bucket]]]
IMAGE, VIDEO = (1, 5, 10), (5, 5, 8)  # 50 and 200 tokens
CATALOG = Catalog((Bucket("image", IMAGE), Bucket("video", VIDEO)))


def samples(**grids: list[tuple[int, int, int]]) -> list[Sample]:
    return [Sample(f"{name}-{i}", grid) for name, all_of in grids.items() for i, grid in enumerate(all_of)]


def mixed(seed: int, count: int = 60) -> list[Sample]:
    """Shapes of which only a few fit into a batch of 1000 tokens."""
    rng = random.Random(seed)
    return samples(x=[(rng.choice([1, 3, 9]), rng.randint(4, 9), rng.randint(5, 9)) for _ in range(count)])


def tokens(batch: list[tuple[str, Bucket]]) -> int:
    return sum(bucket.num_tokens for _, bucket in batch)


def video_tokens(batch: list[tuple[str, Bucket]]) -> int:
    return sum(bucket.num_tokens for _, bucket in batch if bucket.is_video)


def keys(batches: Dealt) -> list[str]:
    return [key for batch in batches for key, _ in batch]


@pytest.mark.parametrize("share", [None, 0.0, 0.4, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_every_sample_once_in_every_epoch(seed: int, share: float | None) -> None:
    have = mixed(seed)
    sampler = GlobalBatchSampler(have, CATALOG, tokens_per_batch=1000, video_token_share=share, seed=seed)
    for epoch in range(20):
        batches = sampler.deal(epoch)
        assert sorted(keys(batches)) == sorted(sample.key for sample in have)
        assert len(batches) == sampler.num_batches
        assert all(batches)


@pytest.mark.parametrize("seed", range(5))
def test_no_epoch_exceeds_the_budget(seed: int) -> None:
    """Epochs pack differently; making their number constant must not overfill a batch, nor with it the
    memory."""
    sampler = GlobalBatchSampler(mixed(seed), CATALOG, tokens_per_batch=1000, seed=seed)
    for epoch in range(100):
        assert max(tokens(batch) for batch in sampler.deal(epoch)) <= 1000


def test_all_ranks_deal_alike_and_epochs_differ() -> None:
    a, b = (GlobalBatchSampler(mixed(0), CATALOG, tokens_per_batch=1000, seed=3) for _ in range(2))
    for epoch in (5, 0, 7):  # whatever was asked for before, as after a resume
        assert a.deal(epoch) == b.deal(epoch) == a.deal(epoch)
    assert a.deal(0) != a.deal(1)
    other_seed = GlobalBatchSampler(mixed(0), CATALOG, tokens_per_batch=1000, seed=4)
    assert other_seed.deal(0) != a.deal(0)


def test_without_shuffling_the_order_is_that_of_the_samples() -> None:
    have = samples(image=[IMAGE] * 10)
    sampler = GlobalBatchSampler(have, CATALOG, tokens_per_batch=150, shuffle=False)
    assert keys(sampler.deal(0)) == [sample.key for sample in have] == keys(sampler.deal(1))
    assert [len(batch) for batch in sampler.deal(0)] == [3, 3, 3, 1]


def shares_while_both_last(batches: Dealt) -> list[tuple[int, int]]:
    """(video tokens, all tokens) so far, after each batch until one kind runs out."""
    left_video, left_image = sum(map(video_tokens, batches)), sum(map(tokens, batches))
    left_image -= left_video
    sums, video, total = [], 0, 0
    for batch in batches:
        video, total = video + video_tokens(batch), total + tokens(batch)
        if video == left_video or total - video == left_image:
            break
        sums.append((video, total))
    return sums


@pytest.mark.parametrize("share", [0.2, 0.35, 0.5, 0.8])
@pytest.mark.parametrize(
    "video",
    [VIDEO, (9, 10, 10), (10, 10, 10), (30, 10, 10)],
    ids=["small", "most", "all", "thrice the budget"],
)
def test_the_video_share_holds_on_average(video: tuple[int, int, int], share: float) -> None:
    """Also where a video is larger than the share of one batch: it then comes in every second or third."""
    have = samples(video=[video] * 40, image=[IMAGE] * 600)
    sampler = GlobalBatchSampler(have, CATALOG, tokens_per_batch=1000, video_token_share=share, shuffle=False)
    sums = shares_while_both_last(sampler.deal(0))
    assert len(sums) >= 5
    one = video[0] * video[1] * video[2]
    assert all(abs(got - share * total) <= one + IMAGE[1] * IMAGE[2] for got, total in sums)


def test_without_a_share_kinds_are_dealt_as_there_are() -> None:
    have = samples(video=[VIDEO] * 30, image=[IMAGE] * 120)  # half of the tokens each
    sums = shares_while_both_last(
        GlobalBatchSampler(have, CATALOG, tokens_per_batch=1000, shuffle=False).deal(0)
    )
    assert len(sums) >= 9
    assert all(abs(got - total / 2) <= 250 for got, total in sums)


def test_one_large_sample_holds_nothing_up() -> None:
    """A video beyond the budget is a batch of its own, and the others still come mixed with images."""
    have = samples(large=[(30, 10, 10)], video=[VIDEO] * 40, image=[IMAGE] * 160, wide=[(1, 40, 50)])
    sampler = GlobalBatchSampler(have, CATALOG, tokens_per_batch=1000, shuffle=False)
    batches = sampler.deal(0)
    alone = [batch for batch in batches if tokens(batch) > 1000]
    assert sorted(keys(alone)) == ["large-0", "wide-0"]
    assert [len(batch) for batch in alone] == [1, 1]
    both = [batch for batch in batches if 0 < video_tokens(batch) < tokens(batch)]
    assert len(both) >= 5


@pytest.mark.parametrize("budget", [50, 1000, 10**6])
def test_buckets_of_one_sample(budget: int) -> None:
    have = samples(x=[(1, 1, n) for n in range(1, 20)] + [(3, 1, 5)])
    sampler = GlobalBatchSampler(have, CATALOG, tokens_per_batch=budget)
    assert sorted(keys(sampler.deal(0))) == sorted(sample.key for sample in have)
    assert sampler.num_batches == (1 if budget >= 1000 else len(sampler.deal(3)))
    assert sampler.counts()["adhoc-1x1x7"] == 1
    assert [bucket.num_tokens for bucket in sampler.buckets] == sorted(
        bucket.num_tokens for bucket in sampler.buckets
    )


def test_one_sample() -> None:
    sampler = GlobalBatchSampler(samples(x=[VIDEO]), CATALOG, tokens_per_batch=1)
    assert sampler.num_batches == 1
    assert keys(sampler.deal(4)) == ["x-0"]


@pytest.mark.parametrize("limit", [None, 7, 4])
@pytest.mark.parametrize("window", [1, 2, 3, 100])
def test_windows_are_accumulation_windows(window: int, limit: int | None) -> None:
    sampler = GlobalBatchSampler(samples(image=[IMAGE] * 19), CATALOG, tokens_per_batch=100, shuffle=False)
    batches = sampler.epoch_batches(2, first_step=30, window=window, limit=limit)
    assert len(batches) == (10 if limit is None else limit)
    assert [batch.step for batch in batches] == list(range(30, 30 + len(batches)))
    assert {batch.epoch for batch in batches} == {2}
    for start in range(0, len(batches), window):  # the last one may be short: in number and in samples
        part = batches[start : start + window]
        assert {batch.window_sequences for batch in part} == {sum(len(batch.sequences) for batch in part)}
        assert {batch.window_tokens for batch in part} == {sum(batch.num_tokens for batch in part)}


def test_wrong_settings_are_named() -> None:
    have = samples(image=[IMAGE])
    with pytest.raises(ConfigError, match="tokens_per_batch=0"):
        GlobalBatchSampler(have, CATALOG, tokens_per_batch=0)
    with pytest.raises(ConfigError, match=r"video_token_share=1\.5"):
        GlobalBatchSampler(have, CATALOG, tokens_per_batch=1, video_token_share=1.5)
    with pytest.raises(DataError, match="no sample to train on"):
        GlobalBatchSampler([], CATALOG, tokens_per_batch=1)
    with pytest.raises(DataError, match="keys repeat"):
        GlobalBatchSampler(have * 2, CATALOG, tokens_per_batch=1)
    with pytest.raises(DataError, match="no bucket of the catalog"):
        GlobalBatchSampler(
            samples(odd=[(2, 2, 2)]), Catalog(CATALOG.buckets, strict=True), tokens_per_batch=1
        )
