"""The modeled cluster and the workload suites that the planner is measured on. Nothing here was measured
on a GPU.

Wan2.1-1.3B with full checkpointing: forward twice, backward once. See docs/results for what the constants
mean.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from zellige_lightning.placement import Bucket, GlobalBatch, ParallelConfig, Topology
from zellige_lightning.planner import MemoryModel, ModelGeometry, ProfileTable

LAYERS, WIDTH, HEADS, HEAD_DIM, FFN = 30, 1536, 12, 128, 8960
SHARES = (35, 40, 45, 50, 55, 60)  # video tokens, percent
FRAMES = {10: 41, 15: 61}  # latent frames of a clip at 16 fps
VIDEO_MIX = {"480p": (0.13, (30, 52)), "720p": (0.22, (45, 80)), "1080p": (0.65, (68, 120))}
IMAGE_MIX = {
    "256p": (0.10, (16, 16)),
    "480p": (0.20, (30, 52)),
    "720p": (0.35, (45, 80)),
    "1080p": (0.35, (68, 120)),
}


@dataclass(frozen=True)
class Machine:
    """Rates of one rank: FLOP/s, bytes/s, seconds."""

    peak: float = 312e12
    linear_share: float = 0.60
    forward_share: float = 0.62
    backward_share: float = 0.50
    node_bytes_per_s: float = 110e9
    cross_bytes_per_s: float = 11e9
    collective_s: float = 35e-6
    hop_s: float = 15e-6
    launch_s: float = 450e-6  # per split segment, layer and pass: the one free constant


def price_us(
    num_tokens: int, config: ParallelConfig, crosses_nodes: bool, machine: Machine = Machine()
) -> int:
    """Modeled price per participating rank."""
    local = num_tokens / config.degree
    linear = local * (12 * WIDTH**2 + 4 * WIDTH * FFN) * 4 / (machine.peak * machine.linear_share)
    rows, columns = num_tokens / (config.q * config.k), num_tokens / config.k
    flops = 4 * rows * columns * WIDTH / config.h
    share = rows / (rows + 250) * columns / (columns + 250)
    passes = 2 / machine.forward_share + 2.5 / machine.backward_share
    seconds = linear + config.k * flops * passes / (machine.peak * share)
    if config.degree > 1:
        seconds += _communication_s(local, config, crosses_nodes, machine) + 3 * machine.launch_s
    return max(1, round(seconds * LAYERS * 1e6))


def _communication_s(local: float, config: ParallelConfig, crosses_nodes: bool, machine: Machine) -> float:
    """Per layer over two forwards and a backward of twice a forward's traffic; a ring hides behind its
    compute."""
    rate = machine.cross_bytes_per_s if crosses_nodes else machine.node_bytes_per_s
    token = WIDTH * 2  # bytes of one of q, k, v, o
    seconds = 0.0
    if config.h > 1:
        sent = 4 * local * token * (config.h - 1) / config.h
        seconds += 2 * machine.collective_s + sent / rate
    if config.q > 1:
        seconds += machine.collective_s + 2 * local * config.h * token / config.h * (config.q - 1) / rate
    if config.k > 1:
        seconds += (config.k - 1) * machine.hop_s
    return 4 * seconds


def paper_configs(max_degree: int) -> list[ParallelConfig]:
    """Pure configurations of every degree, and Ulysses with one other axis of two."""
    found = {ParallelConfig()}
    for degree in range(2, max_degree + 1):
        found |= {ParallelConfig(degree, 1, 1), ParallelConfig(1, 1, degree)}
        if HEADS % degree == 0:
            found.add(ParallelConfig(1, degree, 1))
        if degree % 2 == 0 and HEADS % (degree // 2) == 0:
            found |= {ParallelConfig(2, degree // 2, 1), ParallelConfig(1, degree // 2, 2)}
    return sorted(found, key=lambda c: (c.degree, c))


def buckets(seconds: int) -> list[Bucket]:
    frames = FRAMES[seconds]
    videos = [Bucket(f"video-{n}-{seconds}s", (frames, *grid)) for n, (_, grid) in VIDEO_MIX.items()]
    return videos + [Bucket(f"image-{n}", (1, *grid)) for n, (_, grid) in IMAGE_MIX.items()]


def table(topology: Topology, seconds: int, max_degree: int) -> ProfileTable:
    """Prices of every bucket, configuration and topology class that aligned rank sets of the topology
    have."""
    prices = {}
    for config in paper_configs(min(max_degree, topology.world_size)):
        starts = range(0, topology.world_size - config.degree + 1, config.degree)
        for where in {topology.class_of(tuple(range(s, s + config.degree))) for s in starts}:
            for bucket in buckets(seconds):
                prices[bucket.name, config, where] = price_us(bucket.num_tokens, config, where != "node")
    return ProfileTable(tuple(buckets(seconds)), prices, {}, 0, {"modeled": "wan2.1-1.3b"})


MEMORY = MemoryModel(
    ModelGeometry(
        num_layers=LAYERS,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        element_bytes=2,
        resident_bytes_per_token=LAYERS * WIDTH * 2,
        transient_bytes_per_token=41_000,
        bytes_per_sequence=0,
    )
)


def suite_counts(share: int, seconds: int, total_tokens: int) -> dict[Bucket, int]:
    """Sequences per bucket: `share` percent of the tokens are video tokens, split as the mixes say."""
    mixes = [(VIDEO_MIX, share / 100), (IMAGE_MIX, 1 - share / 100)]
    shares = [part * of for mix, of in mixes for part, _ in mix.values()]
    return {b: round(total_tokens * s / b.num_tokens) for b, s in zip(buckets(seconds), shares, strict=True)}


def batch_of(counts: Iterable[tuple[Bucket, int]], step: int = 0) -> GlobalBatch:
    return GlobalBatch.of(step, 0, ((f"{b.name}/{i}", b) for b, count in counts for i in range(count)))


def random_counts(rng: random.Random, seconds: int, total_tokens: int) -> dict[Bucket, int]:
    """A batch with the suites' mixes, each part of them scaled by 0.3 to 1.7, and 20 to 80 % video tokens."""
    share = rng.uniform(0.2, 0.8)
    parts = []
    for mix, of in ((VIDEO_MIX, share), (IMAGE_MIX, 1 - share)):
        weights = [part * rng.uniform(0.3, 1.7) for part, _ in mix.values()]
        parts += [of * weight / sum(weights) for weight in weights]
    wanted = [total_tokens * part / b.num_tokens for b, part in zip(buckets(seconds), parts, strict=True)]
    return {b: int(n) + (rng.random() < n - int(n)) for b, n in zip(buckets(seconds), wanted, strict=True)}


def mean_memory_mib(batch: GlobalBatch, world: int) -> float:
    """Memory of all sequences kept whole, per rank."""
    return sum(MEMORY.memory_mib(s.num_tokens, ParallelConfig()) for s in batch.sequences) / world
