"""The numbers behind the paper's Figs. 1 and 3, modeled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zellige_lightning.placement.plan import ParallelConfig, PlacementOption
from zellige_lightning.placement.sequence import Bucket
from zellige_lightning.simulator.cluster import Cluster
from zellige_lightning.simulator.compare import Stage
from zellige_lightning.simulator.constants import (
    FITTED_CROSSOVER_TOKENS,
    WAN_1_3B,
    Transformer,
    image,
    video,
)
from zellige_lightning.simulator.durations import StepModel
from zellige_lightning.simulator.prices import modeled_table
from zellige_lightning.simulator.step import StepSimulator
from zellige_lightning.simulator.traffic import BACKWARD, FORWARD
from zellige_lightning.simulator.workloads import batch_of, suite_counts


@dataclass(frozen=True)
class Demand:
    """Memory and compute of a shape over those of a 256p image (Fig. 1a).

    Args:
        memory: ratio of tokens: linear, without intercept.
        fitted: L (c + L) with the fitted c.
        flops: forward operations of the whole model, text and embeddings left out.
    """

    bucket: Bucket
    memory: float
    fitted: float
    flops: float


def figure_1a(model: Transformer = WAN_1_3B) -> list[Demand]:
    shapes = [image(n) for n in ("256p", "480p", "720p", "1080p")] + [
        video(n, 10) for n in ("480p", "720p", "1080p")
    ]
    base = shapes[0].num_tokens

    def fitted(n: int) -> float:
        return n * (FITTED_CROSSOVER_TOKENS + n)

    def flops(n: int) -> float:
        return n * model.linear_flops_per_token + 4.0 * n * n * model.width

    return [
        Demand(b, b.num_tokens / base, fitted(b.num_tokens) / fitted(base), flops(b.num_tokens) / flops(base))
        for b in shapes
    ]


def figure_1b(cluster: Cluster) -> tuple[float, float]:
    """Step seconds of two ranks with equal tokens: one with 41 720p images, one with a 10-second 720p
    video."""
    simulator = StepSimulator(cluster, WAN_1_3B, cluster.topology(1))
    still, clip = image("720p"), video("720p", 10)
    count = clip.num_tokens // still.num_tokens
    whole = PlacementOption(ParallelConfig(), (0,))
    light = simulator.placement([whole] * count, [still.num_tokens] * count)
    return light.makespan, simulator.placement([whole], [clip.num_tokens]).makespan


def figure_3a(cluster: Cluster, shares: Sequence[int]) -> dict[str, list[float]]:
    """Max / mean of rank times of naive and AdaptiveLoad on 4 ranks, per video-token share: Fig. 2's three
    videos with as many 720p images as the share needs (at 35 % these are the paper's 228). The paper does
    not say so."""
    still, clip = image("720p"), video("720p", 10)
    topology = cluster.topology(4)
    table = modeled_table(cluster, WAN_1_3B, topology, [clip, still])
    stage = Stage(cluster, WAN_1_3B, topology, table, cluster.cap_mib(WAN_1_3B))
    found: dict[str, list[float]] = {"naive": [], "adaptive_load": []}
    for share in shares:
        images = round(3 * clip.num_tokens * (100 - share) / share / still.num_tokens)
        for policy, values in found.items():
            row = stage.row(policy, batch_of({clip: 3, still: images}))
            assert row.times is not None
            values.append(row.times.imbalance)
    return found


def figure_3b(cluster: Cluster, degrees: Sequence[int] = (2, 4, 8)) -> dict[str, dict[int, float]]:
    """Share of attention time that is communication, for images split over `degree` ranks (Ulysses as far
    as the heads go, a ring for the rest): the wire and the launch of split attention, over those and the
    kernels."""
    found: dict[str, dict[int, float]] = {}
    for name in ("256p", "480p", "720p", "1080p"):
        found[name] = {
            degree: _communication_share(cluster, image(name).num_tokens, degree) for degree in degrees
        }
    return found


def _communication_share(cluster: Cluster, num_tokens: int, degree: int) -> float:
    h = max(d for d in range(1, degree + 1) if degree % d == 0 and WAN_1_3B.heads % d == 0)
    config, topology = ParallelConfig(1, h, degree // h), cluster.topology(degree)
    times = StepSimulator(cluster, WAN_1_3B, topology).placement(
        [PlacementOption(config, tuple(range(degree)))], [num_tokens]
    )
    step = StepModel(cluster, WAN_1_3B, topology)
    local = -(-num_tokens // degree)
    linear = WAN_1_3B.layers * (2 * step.linear_s(local, FORWARD) + step.linear_s(local, BACKWARD))
    attention = times.makespan - linear
    rows = num_tokens * h // degree
    kernel = sum(step.attention_s(rows, rows, 1 / h, w) for w in (FORWARD, FORWARD, BACKWARD)) * degree / h
    return 1.0 - min(1.0, WAN_1_3B.layers * kernel / attention)


def mixed_shares(seconds: int, total_tokens: int, shares: Sequence[int]) -> dict[int, float]:
    """Video-token share that whole sequences really give, beside the nominal one."""
    found = {}
    for share in shares:
        counts = suite_counts(share, seconds, total_tokens)
        tokens = sum(b.num_tokens * n for b, n in counts.items())
        found[share] = sum(b.num_tokens * n for b, n in counts.items() if b.is_video) / tokens
    return found
