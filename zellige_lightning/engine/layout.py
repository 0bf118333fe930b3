"""Who sends how many rows to whom in a block: counts only, so that they can be checked without processes.

Coordinates of position p in a rank set are (iq, ik, ih) with ih fastest, p = (iq*k + ik)*h + ih. The h
positions of one (iq, ik) form a *super-shard*: after the head exchange each of them holds all its tokens
for H/h heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zellige_lightning.placement.schedule import Block, shard

Rows = tuple[int, ...]

# Received rows start at multiples of it: GPU kernels load 16 bytes at a time, and the last bit of a CPU
# matrix product depends on the alignment.
ALIGNMENT_BYTES = 16


def padding_bytes(row_bytes: int) -> int:
    """What a row of the packed head exchange is padded by."""
    return -row_bytes % ALIGNMENT_BYTES


# Below this size a chunk costs more in latency than it hides.
SMALLEST_CHUNK_BYTES = 2**20


def gather_chunks(key_bytes: int, heads: int, most: int) -> int:
    """In how many chunks of heads keys and values are gathered: the same on all members.

    Args:
        key_bytes: gathered keys and values together.
        heads: of each member after the head exchange.
        most: bound on the chunks.
    """
    wanted = min(most, heads, key_bytes // SMALLEST_CHUNK_BYTES)
    return max((n for n in range(2, wanted + 1) if heads % n == 0), default=1)


@dataclass(frozen=True)
class BlockLayout:
    """The part of one position in a split block. All row counts are indexed by position in the rank set."""

    block: Block
    position: int

    @property
    def degree(self) -> int:
        return self.block.config.degree

    @cached_property
    def coordinates(self) -> tuple[int, int, int]:
        """(iq, ik, ih) of this position."""
        config = self.block.config
        return (
            self.position // (config.k * config.h),
            self.position // config.h % config.k,
            self.position % config.h,
        )

    @cached_property
    def rows(self) -> Rows:
        """Local tokens of each position, over all segments of the block."""
        return tuple(
            sum(len(shard(s.num_tokens, p, self.degree)) for s in self.block.segments)
            for p in range(self.degree)
        )

    def super_shard_rows(self, iq: int, ik: int) -> int:
        config = self.block.config
        first = (iq * config.k + ik) * config.h
        return sum(self.rows[first : first + config.h])

    @property
    def query_rows(self) -> int:
        """Query tokens of this position after the head exchange."""
        iq, ik, _ = self.coordinates
        return self.super_shard_rows(iq, ik)

    @property
    def query_lengths(self) -> Rows:
        """`query_rows` by segment."""
        if len(self.block.segments) > 1:  # pure Ulysses: every position sees every token of every sequence
            return tuple(s.num_tokens for s in self.block.segments)
        return (self.query_rows,)

    def key_rows(self, ik: int) -> int:
        """Keys of ring block `ik`, gathered over the query axis."""
        return sum(self.super_shard_rows(iq, ik) for iq in range(self.block.config.q))

    def ring_block(self, hop: int) -> int:
        """The ring block that this position holds at `hop`."""
        return (self.coordinates[1] - hop) % self.block.config.k

    def _on(self, counts: dict[int, int]) -> Rows:
        return tuple(counts.get(p, 0) for p in range(self.degree))

    def _at(self, iq: int, ik: int, ih: int) -> int:
        config = self.block.config
        return (iq * config.k + ik) * config.h + ih

    def scatter_heads(self) -> tuple[Rows, Rows]:
        """(rows sent, rows received): own tokens to each head peer, their tokens from them."""
        iq, ik, _ = self.coordinates
        peers = [self._at(iq, ik, ih) for ih in range(self.block.config.h)]
        own = self.rows[self.position]
        return self._on(dict.fromkeys(peers, own)), self._on({p: self.rows[p] for p in peers})

    def gather_heads(self) -> tuple[Rows, Rows]:
        """The inverse of `scatter_heads`."""
        sent, received = self.scatter_heads()
        return received, sent

    def gather_keys(self) -> tuple[Rows, Rows]:
        """Own keys to every query peer, theirs from them (paper, Table II: gather K/V once)."""
        _, ik, ih = self.coordinates
        peers = {self._at(iq, ik, ih): self.super_shard_rows(iq, ik) for iq in range(self.block.config.q)}
        return self._on(dict.fromkeys(peers, self.query_rows)), self._on(peers)

    def reduce_keys(self) -> tuple[Rows, Rows]:
        """The inverse of `gather_keys`: their part of dK/dV to each query peer, own part from each."""
        sent, received = self.gather_keys()
        return received, sent

    def ring_hop(self, hop: int) -> tuple[Rows, Rows]:
        """The block held at `hop` to the next ring position, the one before it from the previous."""
        iq, ik, ih = self.coordinates
        size = self.block.config.k
        following, previous = self._at(iq, (ik + 1) % size, ih), self._at(iq, (ik - 1) % size, ih)
        return (
            self._on({following: self.key_rows(self.ring_block(hop))}),
            self._on({previous: self.key_rows(self.ring_block(hop + 1))}),
        )

    def member_pieces(self) -> list[tuple[int, int]]:
        """For each segment and then each head peer, the (start, stop) of its tokens in received rows,
        which come peer by peer: the order that makes sequences contiguous."""
        starts, total = {}, 0
        for p in range(self.degree):
            for i, segment in enumerate(self.block.segments):
                length = len(shard(segment.num_tokens, p, self.degree))
                starts[i, p] = (total, total + length)
                total += length
        return [starts[i, p] for i in range(len(self.block.segments)) for p in range(self.degree)]
