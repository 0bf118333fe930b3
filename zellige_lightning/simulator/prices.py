"""Modeled prices: what one sequence alone costs each participating rank of a modeled cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from zellige_lightning.placement.plan import ParallelConfig, PlacementOption
from zellige_lightning.placement.sequence import Bucket
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.cost import ProfileTable
from zellige_lightning.planner.options import legal_rank_sets
from zellige_lightning.simulator.cluster import Cluster
from zellige_lightning.simulator.constants import Transformer
from zellige_lightning.simulator.step import StepSimulator


def default_configs(
    num_heads: int, world_size: int, max_degree: int | None = None
) -> tuple[ParallelConfig, ...]:
    """Pure configurations of every degree up to 8 and of every divisor of the world, and Ulysses with one
    other axis: any of two, and all of those over the whole world (USP's factorizations)."""
    limit = min(world_size, max_degree or world_size)
    degrees = {d for d in range(2, limit + 1) if d <= 8 or world_size % d == 0 or num_heads % d == 0}
    heads = [h for h in range(1, num_heads + 1) if num_heads % h == 0]
    found = {ParallelConfig()}
    for d in degrees:
        found |= {ParallelConfig(d, 1, 1), ParallelConfig(1, 1, d)}
        for h in heads:
            if d % h == 0 and (d // h <= 2 or d == world_size):
                found |= {ParallelConfig(d // h, h, 1), ParallelConfig(1, h, d // h)}
    return tuple(sorted(found, key=lambda c: (c.degree, c)))


def modeled_table(
    cluster: Cluster,
    model: Transformer,
    topology: Topology,
    buckets: Iterable[Bucket],
    configs: Iterable[ParallelConfig] | None = None,
    family: str = "contiguous",
) -> ProfileTable:
    """Prices of every bucket and configuration on each class of aligned rank sets; of pure Ulysses, which
    rivals put anywhere, on those of `family` too."""
    buckets, world = tuple(buckets), topology.world_size
    simulator, prices = StepSimulator(cluster, model, topology, layers=1), {}
    for config in configs or default_configs(model.heads, world):
        if model.heads % config.h:
            continue
        families = ("aligned", family) if config.is_packed else ("aligned",)
        for name, ranks in _one_set_per_class(topology, config.degree, families).items():
            for bucket in buckets:
                option = PlacementOption(config, ranks)
                seconds = simulator.placement([option], [bucket.num_tokens]).makespan
                prices[bucket.name, config, name] = max(1, round(1e6 * seconds))
    fingerprint: dict[str, str | int | float] = {"modeled": 1, "cluster": cluster.name, "model": model.name}
    fingerprint |= {"world_size": world, "topology": topology_digest(topology)}
    return ProfileTable(buckets, prices, {}, cluster.fixed_us(model, world), fingerprint)


def topology_digest(topology: Topology) -> str:
    """As the profiler writes it into a profile."""
    return hashlib.sha256(str(topology.node_of).encode()).hexdigest()[:12]


def _one_set_per_class(
    topology: Topology, degree: int, families: Iterable[str]
) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for named in families:
        for ranks in legal_rank_sets(topology, degree, named):
            found.setdefault(topology.class_of(ranks), ranks)
    return found
