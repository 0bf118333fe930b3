"""Which attention outputs are kept from forward to backward where layers are recomputed.

Recomputing a layer repeats its attention, and for split sequences its exchanges. A kept output costs
H*(D*bytes + 4) bytes per local token and layer and saves time that grows with the sequence: so the longest
sequences come first.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement import Block, PlacementOption, RankSchedule
from zellige_lightning.placement.schedule import shard

SAVE_MODES = ("none", "anchors", "all", "auto")
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class SavePolicy:
    """Chooses the sequences whose attention output is kept.

    Args:
        mode: `none`; `anchors`, the split sequences, whose recomputation would repeat exchanges; `all`;
            `auto`, as many as the memory left under the cap holds, longest first.
        bytes_per_token: kept per local token, over all layers.
        cap_mib: memory that sequences may take on one rank; for `auto`.
    """

    mode: str = "none"
    bytes_per_token: int = 0
    cap_mib: int = 0

    def __post_init__(self) -> None:
        if self.mode not in SAVE_MODES:
            raise ConfigError(f"engine.save_attention = {self.mode!r}", fix=f"choose one of {SAVE_MODES}")

    def choose(
        self, options: Rows[PlacementOption], lengths: Rows[int], memory_mib: Rows[int]
    ) -> frozenset[int]:
        """Indices of the sequences to keep; the same on every rank, since it follows from the plan alone.

        Args:
            options, lengths: of each sequence.
            memory_mib: planned memory of each rank.
        """
        if self.mode == "none":
            return frozenset()
        if self.mode == "all":
            return frozenset(range(len(options)))
        if self.mode == "anchors":
            return frozenset(i for i, option in enumerate(options) if not option.config.is_whole)
        return self._affordable(options, lengths, memory_mib)

    def _affordable(
        self, options: Rows[PlacementOption], lengths: Rows[int], memory_mib: Rows[int]
    ) -> frozenset[int]:
        room = [(self.cap_mib - used) * 2**20 for used in memory_mib]
        kept = set()
        for index in sorted(range(len(options)), key=lambda i: (-lengths[i], i)):
            ranks, degree = options[index].ranks, options[index].config.degree
            needs = [self.bytes_per_token * len(shard(lengths[index], p, degree)) for p in range(degree)]
            if all(room[rank] >= need for rank, need in zip(ranks, needs, strict=True)):
                kept.add(index)
                for rank, need in zip(ranks, needs, strict=True):
                    room[rank] -= need
        return frozenset(kept)


def divide(schedule: RankSchedule, kept: frozenset[int]) -> list[tuple[RankSchedule, Slices, bool]]:
    """The kept part of a schedule and the rest, each with the rows that it takes from the buffer and whether
    it is kept. Empty parts are left out; a schedule without blocks stays one part."""
    parts = []
    for wanted in (True, False):
        blocks: list[Block] = []
        slices: list[slice] = []
        start = 0
        for block in schedule.blocks:
            offset, members = block.start, []
            for segment in block.segments:
                if (segment.sequence in kept) is wanted:
                    members.append(segment)
                    _extend(slices, offset, offset + len(segment))
                offset += len(segment)
            if members:
                blocks.append(Block(block.config, block.ranks, tuple(members), start))
                start = blocks[-1].stop
        if blocks:
            parts.append(
                (RankSchedule(schedule.rank, schedule.world_size, tuple(blocks)), tuple(slices), wanted)
            )
    return parts or [(schedule, (slice(0, 0),), False)]


def _extend(slices: list[slice], start: int, stop: int) -> None:
    """Add rows, joined to the slice before where they follow it."""
    if slices and slices[-1].stop == start:
        slices[-1] = slice(slices[-1].start, stop)
    else:
        slices.append(slice(start, stop))
