"""Attention bytes from a placement alone: who sends how much to whom, for any number of ranks, without
processes.

It counts what the engine exchanges. The engine saves local tensors, so that backward exchanges q, k and v
again:

| axis | forward | backward |
|---|---|---|
| h (Ulysses) | q, k, v out; out and log-sum-exp back | q, k, v, out, dout and log-sum-exp out; dq, dk, dv
back | | q (all-gather) | k and v gathered | k and v gathered; dk and dv reduced, in the accumulation dtype
| | k (ring) | k and v, k - 1 hops | k and v, k - 1 hops; dk and dv, k hops, in the accumulation dtype |

With full activation checkpointing forward runs twice. Coordinates of position p are (iq, ik, ih), ih fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from zellige_lightning.placement.attention import AttentionGeometry
from zellige_lightning.placement.plan import ParallelConfig, PlacementOption
from zellige_lightning.placement.schedule import shard, split_blocks
from zellige_lightning.placement.topology import Topology

FORWARD, BACKWARD = "forward", "backward"
ALIGNMENT_BYTES = 16  # a packed row of the head exchange is padded to a multiple of it
CHECKPOINTED = ((FORWARD, 2), (BACKWARD, 1))  # passes over attention in one step
STORED = ((FORWARD, 1), (BACKWARD, 1))  # where attention is saved, not recomputed


@dataclass(frozen=True)
class Exchange:
    """One collective of a block. `sent[p]` holds the bytes from position p to other positions."""

    kind: str
    sent: tuple[dict[int, int], ...]


@dataclass(frozen=True)
class BlockTraffic:
    """The exchanges of one block, in the engine's order.

    Args:
        config: of the block.
        lengths: tokens of its sequences; more than one only for pure Ulysses.
    """

    config: ParallelConfig
    lengths: tuple[int, ...]
    geometry: AttentionGeometry

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Local tokens of each position."""
        degree = self.config.degree
        return tuple(sum(len(shard(n, p, degree)) for n in self.lengths) for p in range(degree))

    def at(self, iq: int, ik: int, ih: int) -> int:
        return (iq * self.config.k + ik) * self.config.h + ih

    @cached_property
    def positions(self) -> tuple[tuple[int, int, int], ...]:
        """(iq, ik, ih) of every position."""
        q, h, k = self.config.q, self.config.h, self.config.k
        return tuple((iq, ik, ih) for iq in range(q) for ik in range(k) for ih in range(h))

    def query_rows(self, iq: int, ik: int) -> int:
        """Query tokens of a position after the head exchange."""
        first = self.at(iq, ik, 0)
        return sum(self.rows[first : first + self.config.h])

    def key_rows(self, ik: int) -> int:
        """Keys of ring block `ik`, gathered over the query axis."""
        return sum(self.query_rows(iq, ik) for iq in range(self.config.q))

    def ring_block(self, ik: int, hop: int) -> int:
        """The ring block that a position of ring index `ik` holds at `hop`."""
        return (ik - hop) % self.config.k

    @property
    def _heads(self) -> int:
        return self.geometry.num_heads // self.config.h

    def _scatter(self, row_bytes: int) -> Exchange:
        padded = -(-row_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES * self._heads
        return Exchange("ulysses", self._to_head_peers(lambda own, peer: self.rows[own] * padded))

    def _gather(self, row_bytes: int) -> Exchange:
        size = row_bytes * self._heads
        return Exchange("ulysses", self._to_head_peers(lambda own, peer: self.rows[peer] * size))

    def _to_head_peers(self, size: Callable[[int, int], int]) -> tuple[dict[int, int], ...]:
        return tuple(
            {peer: size(p, peer) for j in range(self.config.h) if (peer := self.at(iq, ik, j)) != p}
            for p, (iq, ik, _) in enumerate(self.positions)
        )

    def _to_query_peers(self, kind: str, row_bytes: int, inverse: bool) -> Exchange:
        size = row_bytes * self._heads
        sent = tuple(
            {
                self.at(j, ik, ih): self.query_rows(j if inverse else iq, ik) * size
                for j in range(self.config.q)
                if j != iq
            }
            for iq, ik, ih in self.positions
        )
        return Exchange(kind, sent)

    def _hop(self, kind: str, hop: int, row_bytes: int) -> Exchange:
        k, size = self.config.k, row_bytes * self._heads
        sent = tuple(
            {self.at(iq, (ik + 1) % k, ih): self.key_rows(self.ring_block(ik, hop)) * size}
            for iq, ik, ih in self.positions
        )
        return Exchange(kind, sent)

    def before(self, which: str) -> list[Exchange]:
        """Exchanges ahead of attention: the head exchange, then the gathered keys."""
        packed = self.geometry.scattered_bytes(which == FORWARD)
        found = [self._scatter(packed)] if self.config.h > 1 else []
        if self.config.q > 1:
            found.append(self._to_query_peers("all_gather", 2 * self.geometry.token_bytes, inverse=False))
        return found

    def ring(self, hop: int) -> Exchange:
        """Keys and values on their way to the next position, while attention over those of `hop` runs."""
        return self._hop("ring", hop, 2 * self.geometry.token_bytes)

    def ring_gradient(self, hop: int) -> Exchange:
        """Sums of dk and dv, one hop behind."""
        return self._hop("ring_gradient", hop, self.geometry.gradient_bytes)

    def after(self, which: str) -> list[Exchange]:
        """Exchanges behind attention."""
        found = []
        if which == BACKWARD and self.config.q > 1:
            found.append(self._to_query_peers("reduce_scatter", self.geometry.gradient_bytes, inverse=True))
        if self.config.h > 1:
            found.append(self._gather(self.geometry.returned_bytes(which == FORWARD)))
        return found

    def exchanges(self, which: str) -> list[Exchange]:
        """All of a pass, `forward` or `backward`."""
        k = self.config.k
        found = self.before(which) + [self.ring(hop) for hop in range(k - 1)]
        if which == BACKWARD and k > 1:
            found += [self.ring_gradient(hop) for hop in range(k)]
        return found + self.after(which)


@lru_cache(maxsize=4096)
def block_traffic(
    config: ParallelConfig, lengths: tuple[int, ...], geometry: AttentionGeometry
) -> BlockTraffic:
    """Shared by all blocks of equal configuration and lengths."""
    return BlockTraffic(config, lengths, geometry)


@dataclass(frozen=True)
class AttentionBytes:
    """Bytes that each rank sends in a step's attention, all layers."""

    by_rank: tuple[int, ...]
    by_kind: Counter[str] = field(default_factory=Counter)
    by_link: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.by_rank)


@dataclass(frozen=True)
class SplitRun:
    """Equal split blocks that follow each other in the global order of execution.

    Args:
        lengths: tokens of each sequence of one block; several only for pure Ulysses, which is batched.
        count: how many such blocks.
        first: smallest sequence index.
    """

    config: ParallelConfig
    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    count: int
    first: int


def split_runs(options: Sequence[PlacementOption], lengths: Sequence[int]) -> list[SplitRun]:
    """All split blocks of a placement in their global order, as `build_schedule` makes them for each rank."""
    runs: list[SplitRun] = []
    for option, members in split_blocks(options):
        found = SplitRun(option.config, option.ranks, tuple(lengths[i] for i in members), 1, members[0])
        last = runs[-1] if runs else None
        if last is not None and replace(found, count=last.count, first=last.first) == last:
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(found)
    return runs


def attention_bytes(
    options: Sequence[PlacementOption],
    lengths: Sequence[int],
    topology: Topology,
    geometry: AttentionGeometry,
    num_layers: int = 1,
    passes: Iterable[tuple[str, int]] = CHECKPOINTED,
) -> AttentionBytes:
    """What the engine sends in one step under a placement.

    Args:
        options, lengths: of each sequence, by index.
        topology: names the link of each byte, by `Topology.class_of` of its two ranks: `node`, or `1+1`
        across nodes. passes: how often forward and backward of attention run, see `CHECKPOINTED`.
    """
    by_rank = [0] * topology.world_size
    by_kind, by_link, passes = Counter[str](), Counter[str](), tuple(passes)
    for run in split_runs(options, lengths):
        traffic = block_traffic(run.config, run.lengths, geometry)
        for which, times in passes:
            for exchange in traffic.exchanges(which):
                for position, sent in enumerate(exchange.sent):
                    for peer, size in sent.items():
                        amount = size * times * num_layers * run.count
                        own, other = run.ranks[position], run.ranks[peer]
                        by_rank[own] += amount
                        by_kind[exchange.kind] += amount
                        by_link[topology.class_of((min(own, other), max(own, other)))] += amount
    return AttentionBytes(tuple(by_rank), by_kind, by_link)


def closed_form_bytes(
    config: ParallelConfig, num_tokens: int, geometry: AttentionGeometry, checkpointed: bool = True
) -> int:
    """What the rivals' own implementations send for one sequence, layer and step, over all ranks.

    Per rank and forward: Ulysses 4 (L d / P)(u - 1) / u, ring 2 (L d / P)(r - 1) elements. Backward:
    Ulysses the same again, the ring twice. They keep the exchanged tensors for backward, at the price of
    memory.
    """
    u, r = config.h, config.k
    shard_elements = num_tokens * geometry.num_heads * geometry.head_dim
    ulysses = 4 * shard_elements * (u - 1) / u
    ring = 2 * shard_elements * (r - 1)
    forwards = 2 if checkpointed else 1
    return round(((forwards + 1) * ulysses + (forwards + 2) * ring) * geometry.element_bytes)
