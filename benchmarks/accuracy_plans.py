"""Batches and candidate plans for `benchmarks/profile_accuracy.py`: a covering array of every resolution and
configuration, corners of whole sequences only, and random placements of mixed batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zellige_lightning.placement import Bucket, GlobalBatch, ParallelConfig, PlacementOption, Topology, whole
from zellige_lightning.planner.options import legal_rank_sets

# Small stand-ins of one aspect ratio each for the paper's 480p, 720p and 1080p videos and two image sizes.
VIDEOS = (
    Bucket("video-480", (4, 10, 12)),
    Bucket("video-720", (5, 12, 16)),
    Bucket("video-1080", (5, 16, 16)),
)
IMAGES = (Bucket("image-64", (1, 8, 8)), Bucket("image-256", (1, 16, 16)))
BUCKETS = (*IMAGES, *VIDEOS)
LEAST_TOKENS = 3200  # of a batch per 2 ranks, so that a step takes at least 250 ms
Options = tuple[PlacementOption, ...]


def is_held_out(number: int) -> bool:
    """Half of the batches, of each sort: every figure is of batches that nothing was fitted to."""
    return (number + number // 6) % 2 == 1


@dataclass(frozen=True)
class Candidate:
    """One placement of a batch, and how it was made."""

    kind: str
    options: Options


@dataclass(frozen=True)
class Case:
    """A batch and placements of it."""

    batch: GlobalBatch
    candidates: tuple[Candidate, ...]


def make_cases(
    topology: Topology, configs: Sequence[ParallelConfig], num_batches: int, per_batch: int
) -> list[Case]:
    """Every third batch carries the covering array (one video of each resolution and images), one is a
    corner of images only, the others are random mixes. Fewer candidates than asked for where a batch has not
    as many placements."""
    splits = [config for config in configs if not config.is_whole]
    cases = []
    for number in range(num_batches):
        rng = random.Random(number)
        buckets = _mix(number, topology.world_size, rng)
        names = [(f"{bucket.name}/{i}", bucket) for i, bucket in enumerate(buckets)]
        batch = GlobalBatch.of(number, 0, names)
        wanted = max(per_batch, len(splits) + 2) if number % 3 == 0 else per_batch
        found: dict[Options, Candidate] = {}
        for candidate in _candidates(buckets, topology, splits, rng, number % 3 == 0):
            found.setdefault(candidate.options, candidate)
            if len(found) == wanted:
                break
        cases.append(Case(batch, tuple(found.values())))
    return cases


def _mix(number: int, world_size: int, rng: random.Random) -> list[Bucket]:
    scale = max(1, world_size // 2)
    if number % 3 == 0:
        videos = list(VIDEOS) * scale
        images = [IMAGES[0]] * rng.randrange(4, 17) + [IMAGES[1]] * rng.randrange(1, 6)
    elif number % 6 == 1:  # a corner: no video
        videos, images = [], [IMAGES[0]] * rng.randrange(8, 33) + [IMAGES[1]] * rng.randrange(9, 14)
    else:
        videos = [rng.choice(VIDEOS) for _ in range(scale * rng.randrange(1, 4))]
        images = [IMAGES[0]] * rng.randrange(0, 25) + [IMAGES[1]] * rng.randrange(0, 8)
    buckets = videos + images
    while sum(bucket.num_tokens for bucket in buckets) < LEAST_TOKENS * scale:
        buckets.append(rng.choice(VIDEOS if videos else IMAGES[1:]))
    return buckets


def _candidates(
    buckets: Sequence[Bucket],
    topology: Topology,
    splits: Sequence[ParallelConfig],
    rng: random.Random,
    covering: bool,
) -> Iterator[Candidate]:
    """Without end: first the array or single splits, then whole, then random placements."""
    rows = covering_rows(splits) if covering else [(config,) for config in splits]
    for row in rows:
        chosen: dict[int, ParallelConfig] = {}
        for i, bucket in enumerate(buckets):
            if bucket.is_video and len(chosen) < len(row):
                chosen[i] = row[len(chosen)]
        kind = "covering" if covering else "one split"
        yield Candidate(kind if chosen else "whole", _balanced(buckets, topology, chosen, rng))
    yield Candidate("whole", _balanced(buckets, topology, {}, rng))
    while True:
        share = rng.choice((0.0, 0.4, 0.8))
        chosen = {
            i: rng.choice(splits)
            for i, bucket in enumerate(buckets)
            if rng.random() < (share if bucket.is_video else 0.2 * share)
        }
        yield Candidate("random", _scattered(buckets, topology, chosen, rng))


def covering_rows(configs: Sequence[ParallelConfig]) -> list[tuple[ParallelConfig, ...]]:
    """Rotations: in as many rows as there are configurations, every resolution meets each of them once."""
    count = len(configs)
    return [tuple(configs[(row + place) % count] for place in range(len(VIDEOS))) for row in range(count)]


def _option(topology: Topology, config: ParallelConfig, rng: random.Random) -> PlacementOption:
    return PlacementOption(config, rng.choice(legal_rank_sets(topology, config.degree, "aligned")))


def _balanced(
    buckets: Sequence[Bucket], topology: Topology, chosen: dict[int, ParallelConfig], rng: random.Random
) -> Options:
    """The chosen ones split, the rest whole, longest first to the rank with the fewest tokens."""
    options = {i: _option(topology, config, rng) for i, config in chosen.items()}
    loads = [0.0] * topology.world_size
    for i, option in options.items():
        for rank in option.ranks:
            loads[rank] += _work(buckets[i]) / option.config.degree
    for i in sorted(range(len(buckets)), key=lambda i: -_work(buckets[i])):
        if i not in options:
            rank = loads.index(min(loads))
            options[i] = whole(rank)
            loads[rank] += _work(buckets[i])
    return tuple(options[i] for i in range(len(buckets)))


def _scattered(
    buckets: Sequence[Bucket], topology: Topology, chosen: dict[int, ParallelConfig], rng: random.Random
) -> Options:
    """The chosen ones split, each of the rest on any rank."""
    return tuple(
        _option(topology, chosen[i], rng) if i in chosen else whole(rng.randrange(topology.world_size))
        for i in range(len(buckets))
    )


def _work(bucket: Bucket) -> float:
    """A rough guess, only to make placements that are not absurd."""
    return bucket.num_tokens * (1 + bucket.num_tokens / 3000)
