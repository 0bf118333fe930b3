"""What a rank would send, compute and hold in a step: from its schedule alone, for any number of ranks.

It walks the schedule as `attention.py` and `keys.py` do and takes the rows from the same `BlockLayout`, but
touches neither tensors nor processes. A test holds it to the counters of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from zellige_lightning.engine.counters import Counters, link_between
from zellige_lightning.engine.layout import BlockLayout, Rows, gather_chunks, padding_bytes
from zellige_lightning.placement import AttentionGeometry, Block, RankSchedule, Topology
from zellige_lightning.placement.schedule import whole_pieces

STORED: Mapping[str, int] = MappingProxyType({"forward": 1, "backward": 1})
CHECKPOINTED: Mapping[str, int] = MappingProxyType({"forward": 2, "backward": 1})


def dry_run(
    schedule: RankSchedule,
    geometry: AttentionGeometry,
    topology: Topology | None = None,
    passes: Mapping[str, int] = STORED,
    num_layers: int = 1,
    most_chunks: int = 4,
) -> Counters:
    """The counters of the schedule's rank after one step.

    Args:
        topology: of the world; None where all ranks share a node.
        passes: how often forward and backward run; `CHECKPOINTED` repeats the forward.
        most_chunks: as `engine.gather_chunks`.
    """
    counters = Counters()
    for which, times in passes.items():
        for block in schedule.blocks:
            for _ in range(times * num_layers):
                if block.config.is_whole:
                    counters.kernel_calls[which] += sum(1 for _ in whole_pieces(schedule, which))
                else:
                    _Walk(block, schedule.rank, geometry, topology, counters).run(which, most_chunks)
    return counters


@dataclass
class _Walk:
    """One pass of one rank over one split block."""

    block: Block
    rank: int
    geometry: AttentionGeometry
    topology: Topology | None
    counters: Counters
    layout: BlockLayout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = BlockLayout(self.block, self.block.ranks.index(self.rank))

    @property
    def _heads(self) -> int:
        return self.geometry.num_heads // self.block.config.h

    def run(self, which: str, most_chunks: int) -> None:
        forward, layout = which == "forward", self.layout
        if self.block.config.h > 1:
            packed = self.geometry.scattered_bytes(forward)
            self._exchange("ulysses", layout.scatter_heads(), packed + padding_bytes(packed), self._heads)
        chunks = self._chunks(most_chunks)
        for _ in range(chunks):
            self._keys(which, self._heads // chunks)
        if self.block.config.h > 1:
            back = self.geometry.returned_bytes(forward)
            self._exchange("ulysses", layout.gather_heads(), back, self._heads)

    def _chunks(self, most: int) -> int:
        if self.block.config.q == 1 or self.block.config.k > 1:
            return 1
        return gather_chunks(
            self.layout.key_rows(0) * self._heads * 2 * self.geometry.token_bytes, self._heads, most
        )

    def _keys(self, which: str, heads: int) -> None:
        config, geometry = self.block.config, self.geometry
        if config.q > 1:
            self._exchange("all_gather", self.layout.gather_keys(), 2 * geometry.token_bytes, heads)
        for hop in range(config.k):
            if hop + 1 < config.k:
                self._exchange("ring", self.layout.ring_hop(hop), 2 * geometry.token_bytes, heads)
            if which == "backward" and config.k > 1:
                self._exchange("ring_gradient", self.layout.ring_hop(hop), geometry.gradient_bytes, heads)
            self._kernel(which, self.layout.key_rows(self.layout.ring_block(hop)), heads)
        if which == "backward" and config.q > 1:
            self._exchange("reduce_scatter", self.layout.reduce_keys(), geometry.gradient_bytes, heads)

    def _kernel(self, which: str, keys: int, heads: int) -> None:
        if self.layout.query_rows and keys:
            self.counters.kernel_calls[which] += 1
            self.counters.resident(keys * heads * 2 * self.geometry.token_bytes)

    def _exchange(self, kind: str, rows: tuple[Rows, Rows], row_bytes: int, heads: int) -> None:
        self.counters.sent(
            kind,
            [
                (link_between(self.rank, peer, self.topology), sent * row_bytes * heads)
                for peer, sent in zip(self.block.ranks, rows[0], strict=True)
                if peer != self.rank
            ],
        )
