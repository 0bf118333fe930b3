"""A schedule with its blocks bound to what runs them."""

from __future__ import annotations

from zellige_lightning.engine.attention import SplitAttention, WholePack
from zellige_lightning.engine.collectives import GroupTransport
from zellige_lightning.engine.observer import StepObserver
from zellige_lightning.errors import EngineError
from zellige_lightning.placement import RankSchedule
from zellige_lightning.placement.schedule import PASSES, whole_pieces

Piece = tuple[slice, WholePack]


class Lowered:
    """Executors of a rank's blocks, each with its rows of the buffer.

    Attributes:
        split: split blocks in the global order.
        pieces: per pass, the whole sequences that run in each pause between exchanges.

    Raises:
        EngineError: a split block without process groups.
    """

    def __init__(
        self,
        schedule: RankSchedule,
        transport: GroupTransport | None,
        observer: StepObserver,
        most_chunks: int,
    ) -> None:
        self.schedule = schedule
        self.split: list[tuple[slice, SplitAttention]] = []
        for block in schedule.blocks:
            if block.config.is_whole:
                continue
            if transport is None:
                raise EngineError("a split sequence on an engine without process groups")
            member = SplitAttention(block, schedule.rank, transport, observer, most_chunks)
            self.split.append((slice(block.start, block.stop), member))
        self.pieces: dict[str, dict[int, Piece]] = {
            which: {
                pause: (slice(block.start, block.stop), WholePack(block, observer))
                for pause, block in whole_pieces(schedule, which)
            }
            for which in PASSES
        }
