"""Nodes of ranks, and the class of a rank set: sets of one class cost the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from zellige_lightning.errors import ConfigError


@dataclass(frozen=True)
class Topology:
    """`node_of[r]` is the node of rank r."""

    node_of: tuple[int, ...]

    @classmethod
    def uniform(cls, world_size: int, ranks_per_node: int | None = None) -> Topology:
        """Consecutive ranks fill nodes of `ranks_per_node` (default: one node)."""
        if world_size < 1:
            raise ConfigError(f"a world of {world_size} ranks")
        per_node = ranks_per_node or world_size
        return cls(tuple(rank // per_node for rank in range(world_size)))

    @property
    def world_size(self) -> int:
        return len(self.node_of)

    @property
    def num_nodes(self) -> int:
        return len(set(self.node_of))

    def class_of(self, ranks: tuple[int, ...]) -> str:
        """`node` where all ranks share a node, else the ranks per node, largest first, such as `4+4`."""
        counts = sorted(Counter(self.node_of[r] for r in ranks).values(), reverse=True)
        return "node" if len(counts) == 1 else "+".join(map(str, counts))
