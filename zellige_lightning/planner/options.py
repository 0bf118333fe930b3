"""Executable placement options (paper, Sec. IV-A): legal configurations and the families of legal rank
sets."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from math import comb

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.placement.topology import Topology

FAMILIES = ("aligned", "contiguous", "node", "all")
MAX_GROUPS_PER_RANK = 128  # a communicator costs 0.5-0.7 GB on a GPU; all subsets of 8 ranks are 127 per rank


def legal_configs(
    num_heads: int, world_size: int, max_degree: int | None = None
) -> tuple[ParallelConfig, ...]:
    """All (q, h, k) with h dividing the heads and degree <= `world_size` (and `max_degree`), by degree."""
    limit = min(world_size, max_degree or world_size)
    found = [
        ParallelConfig(q, h, k)
        for h in range(1, min(num_heads, limit) + 1)
        if num_heads % h == 0
        for q in range(1, limit // h + 1)
        for k in range(1, limit // (h * q) + 1)
    ]
    return tuple(sorted(found, key=lambda c: (c.degree, c)))


def legal_rank_sets(topology: Topology, degree: int, family: str) -> tuple[tuple[int, ...], ...]:
    """The rank sets of one degree, ascending.

    Args:
        family: `aligned` (consecutive ranks that start at multiples of the degree; the degree need not
            divide N), `contiguous` (any consecutive ranks), `node` (consecutive ranks of one node that
            start at multiples of the degree inside it), `all` (every subset). One rank is always a legal set.

    Raises:
        ConfigError: unknown family.
    """
    ranks = range(topology.world_size)
    if family not in FAMILIES:
        raise ConfigError(f"unknown rank-set family {family!r}", fix=f"planner.family is one of {FAMILIES}")
    if degree == 1:
        return tuple((r,) for r in ranks)
    if family == "all":
        return tuple(combinations(ranks, degree))
    if family == "node":
        return _node_blocks(topology, degree)
    starts = range(0, topology.world_size - degree + 1, degree if family == "aligned" else 1)
    return tuple(tuple(range(s, s + degree)) for s in starts)


def _node_blocks(topology: Topology, degree: int) -> tuple[tuple[int, ...], ...]:
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(topology.node_of):
        nodes.setdefault(node, []).append(rank)
    blocks = (tuple(n[s : s + degree]) for n in nodes.values() for s in range(0, len(n) - degree + 1, degree))
    return tuple(sorted(blocks))


def legal_family(topology: Topology, family: str, degrees: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    """All rank sets of two and more ranks that may get a process group, in the order in which every rank
    makes them: largest first, then by ranks.

    Raises:
        ConfigError: unknown family.
    """
    degrees = {d for d in degrees if 2 <= d <= topology.world_size}
    sets = (s for d in degrees for s in legal_rank_sets(topology, d, family))
    return tuple(sorted(sets, key=lambda s: (-len(s), s)))


def check_family(
    topology: Topology, family: str, degrees: Iterable[int], max_groups_per_rank: int = MAX_GROUPS_PER_RANK
) -> None:
    """Refuses a family that would give one rank more than `max_groups_per_rank` process groups.

    Raises:
        ConfigError: names the family, the count and the bound.
    """
    world = topology.world_size
    degrees = {d for d in degrees if 2 <= d <= world}
    if family == "all":  # counted, not listed: the list itself would not fit in memory
        most = sum(comb(world - 1, d - 1) for d in degrees)
    elif family == "contiguous":
        most = sum(min(d, world - d + 1) for d in degrees)
    else:
        most = len(degrees)
    if most > max_groups_per_rank:
        raise ConfigError(
            f"rank-set family {family!r} on {world} ranks needs {most} process groups on one rank, "
            f"more than the bound of {max_groups_per_rank}",
            fix="set planner.family=aligned, lower planner.max_degree or raise planner.max_groups_per_rank",
        )
