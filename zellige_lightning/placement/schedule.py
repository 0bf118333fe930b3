"""From a plan to what one rank runs: a pure function, so that it can be tested for any N without processes.

Rules (docs/ARCHITECTURE.md, "Order"): buffer order = block order = execution order. Blocks are sorted by
(-degree, smallest sequence index in the block). That key is the same on every participant of a block, so all
ranks walk one global order of collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from zellige_lightning.errors import EngineError
from zellige_lightning.placement.plan import WHOLE, Filling, ParallelConfig, PlacementOption


def shard(num_tokens: int, position: int, degree: int) -> range:
    """Token range of shard `position` of `degree`. Uneven lengths are normal; nothing is padded."""
    return range(num_tokens * position // degree, num_tokens * (position + 1) // degree)


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a sequence that one rank holds. `tokens` are absolute positions in the sequence."""

    sequence: int
    num_tokens: int
    option: PlacementOption
    tokens: range

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Block:
    """Segments run by one attention call: all whole sequences of a rank, or all pure-Ulysses sequences of one
    configuration and rank set, or one sequence of any other configuration."""

    config: ParallelConfig
    ranks: tuple[int, ...]
    segments: tuple[Segment, ...]
    start: int

    @property
    def num_tokens(self) -> int:
        return sum(len(s) for s in self.segments)

    @property
    def stop(self) -> int:
        return self.start + self.num_tokens

    @property
    def order(self) -> tuple[int, int]:
        return -self.config.degree, min(s.sequence for s in self.segments)


@dataclass(frozen=True)
class RankSchedule:
    """Blocks of one rank in execution order.

    Args:
        filling: None runs all whole sequences in the first pause. It changes neither results nor exchanges,
            so schedules that differ in nothing else are equal.
    """

    rank: int
    world_size: int
    blocks: tuple[Block, ...]
    filling: Filling | None = field(default=None, compare=False)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments in buffer order. Segments without tokens are kept: their rank takes part in
        collectives."""
        return tuple(s for block in self.blocks for s in block.segments)

    @cached_property
    def num_tokens(self) -> int:
        return sum(block.num_tokens for block in self.blocks)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Cumulative segment lengths, `len(segments) + 1` entries, the last is `num_tokens`."""
        total, out = 0, [0]
        for segment in self.segments:
            total += len(segment)
            out.append(total)
        return tuple(out)


PASSES = ("forward", "backward")
END = -1  # the pause of what runs behind all split blocks


def whole_pieces(schedule: RankSchedule, which: str) -> Iterator[tuple[int, Block]]:
    """The parts of a rank's whole pack in a pass, each with the pause in which it runs, in buffer order."""
    pack = next((block for block in schedule.blocks if block.config.is_whole), None)
    if pack is None:
        return
    if schedule.filling is None or len(schedule.blocks) == 1:
        yield 0 if len(schedule.blocks) > 1 else END, pack
        return
    first, start = 0, pack.start
    for pause, count in (*getattr(schedule.filling, which), (END, len(pack.segments))):
        if segments := pack.segments[first : first + count]:
            piece = Block(pack.config, pack.ranks, segments, start)
            yield pause, piece
            first, start = first + count, piece.stop


PADDING = -1  # sequence index of tokens that belong to no sequence


def padded(schedule: RankSchedule, num_segments: int = 2, length: int = 2) -> RankSchedule:
    """`schedule` with whole segments of no sequence added, so that it has at least `num_segments` segments
    and `length` tokens. Compilers give sizes 0 and 1 graphs of their own, and drop the backward of empty
    tensors: then peers would wait for this rank's exchanges for ever."""
    missing = max(num_segments - len(schedule.segments), int(schedule.num_tokens < length))
    if missing <= 0:
        return schedule
    nothing = Segment(PADDING, length, PlacementOption(WHOLE, (schedule.rank,)), range(length))
    split = tuple(block for block in schedule.blocks if not block.config.is_whole)
    own = tuple(s for block in schedule.blocks if block.config.is_whole for s in block.segments)
    start = sum(block.num_tokens for block in split)
    block = Block(WHOLE, (schedule.rank,), (*own, *(nothing,) * missing), start)
    return RankSchedule(schedule.rank, schedule.world_size, (*split, block), schedule.filling)


def _block_key(index: int, option: PlacementOption) -> tuple[object, ...]:
    config = option.config
    if config.is_whole:
        return ("whole",)
    if config.is_packed:
        return ("ulysses", config.h, option.ranks)
    return ("sequence", index)


def split_blocks(options: Iterable[PlacementOption]) -> list[tuple[PlacementOption, list[int]]]:
    """All split blocks of a placement in the global order, as `build_schedule` makes them for each rank: the
    option, and the indices of the sequences."""
    grouped: dict[tuple[object, ...], tuple[PlacementOption, list[int]]] = {}
    for index, option in enumerate(options):
        if len(option.ranks) > 1:
            grouped.setdefault(_block_key(index, option), (option, []))[1].append(index)
    return sorted(grouped.values(), key=lambda block: (-block[0].config.degree, block[1][0]))


def build_schedule(
    options: Iterable[PlacementOption],
    lengths: Iterable[int],
    rank: int,
    world_size: int,
    filling: Filling | None = None,
) -> RankSchedule:
    """The schedule of `rank`.

    Args:
        options: one per sequence, by index.
        lengths: number of tokens of each sequence, by index.
        filling: where its whole sequences run.

    Raises:
        EngineError: a sequence without tokens, or a rank set outside the world.
    """
    grouped: dict[tuple[object, ...], list[Segment]] = {}
    for index, (option, length) in enumerate(zip(options, lengths, strict=True)):
        if length < 1:
            raise EngineError(
                f"sequence {index} has {length} tokens", fix="drop empty sequences before planning"
            )
        if option.ranks[-1] >= world_size:
            raise EngineError(
                f"sequence {index} is placed on ranks {option.ranks} of a world of {world_size}"
            )
        if rank in option.ranks:
            tokens = shard(length, option.ranks.index(rank), option.config.degree)
            grouped.setdefault(_block_key(index, option), []).append(Segment(index, length, option, tokens))

    def order(segments: list[Segment]) -> tuple[int, int]:
        return -segments[0].option.config.degree, segments[0].sequence

    blocks: list[Block] = []
    start = 0
    for segments in sorted(grouped.values(), key=order):
        option = segments[0].option
        config, ranks = (WHOLE, (rank,)) if option.config.is_whole else (option.config, option.ranks)
        blocks.append(Block(config, ranks, tuple(segments), start))
        start = blocks[-1].stop
    return RankSchedule(rank, world_size, tuple(blocks), filling)
