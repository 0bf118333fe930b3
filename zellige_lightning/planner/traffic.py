"""How many bytes a configuration exchanges: what decides between placements that are otherwise alike."""

from __future__ import annotations

from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.cost import ModelGeometry

CROSS_NODE = 8  # weight of a byte between nodes: rates inside and across are 4 to 10 apart on common machines


def traffic(geometry: ModelGeometry, num_tokens: int, config: ParallelConfig, topology_class: str) -> int:
    """Bytes that all ranks of one sequence send in a layer's forward, weighted by its rank set's links.

    Axes nest as in the engine (Table II): all-to-all of q, k, v and the output over h, all-gather of k and v
    over q, ring of k and v over k. Only times are prices; this breaks ties between placements of equal time.
    """
    kv = (
        geometry.kv_bytes_per_token
    )  # k and v of one token over all heads; q and the output weigh as much again
    exchange = 2 * kv * num_tokens * (config.h - 1) // config.h
    gather = kv * num_tokens * (config.q - 1)
    ring = kv * num_tokens * config.q * (config.k - 1)
    return (exchange + gather + ring) * (1 if topology_class == "node" else CROSS_NODE)
