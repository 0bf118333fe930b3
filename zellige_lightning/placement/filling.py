"""Where a rank runs its whole sequences: in the pauses between the exchanges of its split sequences.

All ranks walk the split blocks in one order, so a rank that reaches an exchange early waits for those members
that still compute an earlier block. Whole sequences need nobody, so they belong into such gaps, and into the
time that an exchange is on the wire. A filling moves no exchange: each rank may follow its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from zellige_lightning.placement.plan import Filling, ParallelConfig, PlacementOption
from zellige_lightning.placement.schedule import PASSES, split_blocks

BACKWARD_WORK = 2.5  # of forward's: flash attention computes the scores again
_LATE = 2.0  # a sequence of up to so many times the gap that is left is run in it


@lru_cache(maxsize=1024)
def work_between_pauses(config: ParallelConfig, which: str) -> tuple[float, ...]:
    """Shares of a split block's attention before its first pause, between pauses, and behind the last one.

    The engine pauses after it has started the head exchange, the gather of keys, each ring hop, the
    reduction of key gradients, and the exchange back.
    """
    before = [0.0] * ((config.h > 1) + (config.q > 1))
    behind = [0.0] * (config.h > 1)
    if which == "backward":
        # the sums of dk and dv travel one hop behind and come home; then they are reduced over q
        behind += [0.0] * (2 * (config.k > 1) + (config.q > 1))
    return (*before, *[1 / config.k] * config.k, *behind)


def fill_gaps(
    options: Sequence[PlacementOption],
    attention_us: Sequence[float],
    overhead_us: Sequence[float],
    world_size: int,
) -> tuple[Filling, ...]:
    """The filling of every rank.

    It replays one layer: a stage of a block begins once all its members have done the stage before. Gaps are
    filled in buffer order, with a sequence that is longer than the gap where less is lost by being late.

    Args:
        options: one per sequence, by index.
        attention_us: attention of each sequence in one process, over the step, without exchanges.
        overhead_us: what its exchanges add per rank, over the step.
    """
    ends = _ends_of_whole(options, attention_us, world_size)
    blocks = split_blocks(options)
    passes = []
    for which, work in zip(PASSES, (1.0, BACKWARD_WORK), strict=True):
        replay = _Replay(ends, attention_us)
        per_exchange = (1.0 + BACKWARD_WORK) / work  # in the time of attention over the whole step
        for option, members in blocks:
            exchanges = sum(len(work_between_pauses(option.config, name)) - 1 for name in PASSES)
            overhead = sum(overhead_us[i] for i in members) / exchanges
            replay.block(option, members, which, overhead * per_exchange)
        passes.append(replay.pieces)
    return tuple(Filling(tuple(f), tuple(b)) for f, b in zip(*passes, strict=True))


def _ends_of_whole(
    options: Sequence[PlacementOption], attention_us: Sequence[float], world_size: int
) -> list[list[float]]:
    """Per rank: 0, and the end of each of its whole sequences, if they ran one after the other."""
    whole: list[list[float]] = [[] for _ in range(world_size)]
    for option, duration in zip(options, attention_us, strict=True):
        if len(option.ranks) == 1:
            whole[option.ranks[0]].append(duration)
    return [[0.0, *accumulate(durations)] for durations in whole]


class _Replay:
    """One pass over one layer's attention on all ranks, in the time of the whole step."""

    def __init__(self, ends: Sequence[Sequence[float]], attention_us: Sequence[float]) -> None:
        self._ends, self._attention_us = ends, attention_us
        self._now, self._taken, self._pauses = [0.0] * len(ends), [0] * len(ends), [0] * len(ends)
        self.pieces: list[list[tuple[int, int]]] = [[] for _ in ends]

    def block(self, option: PlacementOption, members: Sequence[int], which: str, exchange_us: float) -> None:
        """Runs a block on all its ranks; each of its exchanges takes `exchange_us`."""
        work_us = sum(self._attention_us[i] for i in members) / option.config.degree
        ready = 0.0
        for stage, share in enumerate(work_between_pauses(option.config, which)):
            for rank in option.ranks:
                if stage:
                    self._fill(rank, ready)
                    self._now[rank] = max(self._now[rank], ready)
                self._now[rank] += share * work_us
            ready = max(self._now[rank] for rank in option.ranks) + exchange_us

    def _fill(self, rank: int, until: float) -> None:
        ends, first, gap = self._ends[rank], self._taken[rank], until - self._now[rank]
        if gap > 0.0 and first + 1 < len(ends):
            last = bisect_right(ends, ends[first] + gap) - 1
            left = gap - (ends[last] - ends[first])
            if last + 1 < len(ends) and ends[last + 1] - ends[last] <= _LATE * left:
                last += 1
            if last > first:
                self.pieces[rank].append((self._pauses[rank], last - first))
                self._now[rank] += ends[last] - ends[first]
                self._taken[rank] = last
        self._pauses[rank] += 1
