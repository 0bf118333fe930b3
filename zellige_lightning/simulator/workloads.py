"""Batches: the paper's suites, its Fig. 2, and a batch that a reviewer asked for."""

from __future__ import annotations

from collections.abc import Mapping

from zellige_lightning.placement.sequence import Bucket, GlobalBatch
from zellige_lightning.simulator.constants import (
    IMAGE_MIX,
    ROWS_COLUMNS,
    VIDEO_MIX,
    Suite,
    image,
    video,
)

Counts = Mapping[Bucket, int]


def suite_counts(share: int, seconds: int, total_tokens: int) -> dict[Bucket, int]:
    """Sequences per bucket: `share` percent of the tokens are video tokens, split inside as the mixes say."""
    wanted = {video(name, seconds): share / 100 * part for name, part in VIDEO_MIX.items()}
    wanted |= {image(name): (1 - share / 100) * part for name, part in IMAGE_MIX.items()}
    return {bucket: round(total_tokens * part / bucket.num_tokens) for bucket, part in wanted.items()}


def suite_batch(suite: Suite, share: int, ranks: int | None = None) -> GlobalBatch:
    """One workload of a suite, for its own world or for another one at the same tokens per rank."""
    total = (ranks or suite.ranks) * suite.tokens_per_rank
    return batch_of(suite_counts(share, suite.seconds, total), step=share)


def batch_of(counts: Counts, step: int = 0) -> GlobalBatch:
    samples = ((f"{bucket.name}/{i}", bucket) for bucket, count in counts.items() for i in range(count))
    return GlobalBatch.of(step, 0, samples)


def fig2_counts() -> dict[Bucket, int]:
    """Three 10-second 720p videos and 228 720p images, on 4 ranks (paper, Fig. 2)."""
    return {video("720p", 10): 3, image("720p"): 228}


def reviewer_counts() -> dict[Bucket, int]:
    """Four 10-second 720p videos and 200 images, on 16 ranks: a composition that the paper did not
    validate. The images' sizes are not stated; 720p here."""
    return {video("720p", 10): 4, image("720p"): 200}


def suite_buckets(seconds: int) -> list[Bucket]:
    """The catalog of a suite."""
    return [video(name, seconds) for name in VIDEO_MIX] + [image(name) for name in ROWS_COLUMNS]
