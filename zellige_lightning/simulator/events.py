"""Event simulation: operations of every rank in order, and exchanges that need the ranks that take part.

A rank computes, *starts* exchanges without waiting, and *waits* for them. An exchange is ready when every
rank that it talks to has started it, and done one transfer later. What a rank waits is split in two: for
others to arrive (waiting), and for the wire (exposed).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

Key = Hashable


@dataclass(frozen=True, slots=True)
class Compute:
    seconds: float


@dataclass(frozen=True, slots=True)
class Start:
    """Take part in exchange `key`: `seconds` on the wire after `peers` have started it too."""

    key: Key
    seconds: float
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    key: Key


Operation = Compute | Start | Wait


@dataclass
class RankClock:
    """Time of one rank so far, in seconds: `now` = computing + exposed + waiting."""

    now: float = 0.0
    computing: float = 0.0
    exposed: float = 0.0
    waiting: float = 0.0
    started: dict[Key, tuple[float, Start]] = field(default_factory=dict)


def run(programs: Mapping[int, Sequence[Operation]]) -> dict[int, RankClock]:
    """Runs each rank's operations.

    Raises:
        RuntimeError: ranks wait for each other for ever (their orders of exchanges differ).
    """
    clocks = {rank: RankClock() for rank in programs}
    position = dict.fromkeys(programs, 0)
    waiting = list(programs)
    while waiting:
        moved, blocked = False, []
        for rank in waiting:
            before = position[rank]
            position[rank] = _advance(rank, programs[rank], before, clocks)
            moved |= position[rank] > before
            if position[rank] < len(programs[rank]):
                blocked.append(rank)
        if blocked and not moved:
            stuck = {rank: programs[rank][position[rank]] for rank in blocked}
            raise RuntimeError(f"ranks wait for each other: {stuck}")
        waiting = blocked
    return clocks


def _advance(rank: int, program: Sequence[Operation], index: int, clocks: Mapping[int, RankClock]) -> int:
    """Runs a rank up to the first exchange that a peer has not started; the index of that operation."""
    clock = clocks[rank]
    while index < len(program):
        operation = program[index]
        if isinstance(operation, Compute):
            clock.now += operation.seconds
            clock.computing += operation.seconds
        elif isinstance(operation, Start):
            clock.started[operation.key] = clock.now, operation
        else:
            ready, start = clock.started[operation.key]
            for peer in start.peers:
                other = clocks[peer].started.get(operation.key)
                if other is None:
                    return index
                ready = max(ready, other[0])
            late, done = max(clock.now, ready), ready + start.seconds
            clock.waiting += late - clock.now
            clock.exposed += max(0.0, done - late)
            clock.now = max(late, done)
        index += 1
    return index
