"""The last step before giving up: named sequences wait for the next batch, where they come first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.sequence import Bucket, GlobalBatch, Sequence
from zellige_lightning.planner.waves import Wave, least_memory, plan_waves

if TYPE_CHECKING:
    from zellige_lightning.planner.planner import BatchPlanner

Deferred = tuple[str, Bucket]


@dataclass(frozen=True)
class PlannedBatch:
    """What a step trains on, and what it leaves to the next.

    Args:
        batch: the planned sequences; the batch itself where nothing is deferred.
        waves: of `batch`.
        waiting: indices of the others in the whole batch, ascending; what `withhold` needs on other ranks.
        deferred: (key, bucket) of these, for `carry`.
    """

    batch: GlobalBatch
    waves: tuple[Wave, ...]
    waiting: tuple[int, ...] = ()
    deferred: tuple[Deferred, ...] = ()

    @property
    def report(self) -> str:
        """One line for the log; empty where nothing is deferred."""
        if not self.deferred:
            return ""
        names = ", ".join(f"{key!r} ({bucket.name})" for key, bucket in self.deferred)
        return f"step {self.batch.step}: {len(self.deferred)} sequences wait for the next batch: {names}"


def carry(batch: GlobalBatch, deferred: Iterable[Deferred]) -> GlobalBatch:
    """`batch` with what the last one deferred in front. Its window grows by as much, so that the loss stays a
    mean over all its sequences."""
    first = list(deferred)
    samples = [*first, *((s.key, s.bucket) for s in batch.sequences)]
    return replace(
        batch,
        sequences=tuple(Sequence(i, key, bucket) for i, (key, bucket) in enumerate(samples)),
        window_sequences=batch.window_sequences + len(first),
        window_tokens=batch.window_tokens + sum(bucket.num_tokens for _, bucket in first),
    )


def withhold(batch: GlobalBatch, waiting: Collection[int]) -> tuple[GlobalBatch, tuple[Deferred, ...]]:
    """The batch without the sequences of these indices, its window as much smaller; and what was taken."""
    staying = [s for s in batch.sequences if s.index not in waiting]
    gone = [s for s in batch.sequences if s.index in waiting]
    rest = replace(
        batch,
        sequences=tuple(Sequence(i, s.key, s.bucket) for i, s in enumerate(staying)),
        window_sequences=batch.window_sequences - len(gone),
        window_tokens=batch.window_tokens - sum(s.num_tokens for s in gone),
    )
    return rest, tuple((s.key, s.bucket) for s in gone)


def plan_or_defer(planner: BatchPlanner, batch: GlobalBatch, carried: Collection[str] = ()) -> PlannedBatch:
    """The whole batch in waves where these plan. Else, with `planner.defer`, few sequences wait: those of the
    largest need.

    Args:
        carried: keys that were deferred before; they never wait twice.

    Raises:
        PlanningError: a sequence fits no option (it would fit none in the next batch either); or the batch
            does not fit, and it may defer nothing, is a part of a longer accumulation window (whose other
            batches count its sequences in their weights), or does not even fit without all that may wait.
    """
    needs = least_memory(planner, batch)
    try:
        return PlannedBatch(batch, tuple(plan_waves(planner, batch, planner.config.max_waves)))
    except PlanningError as error:
        if not planner.config.defer or batch.window_sequences != len(batch.sequences):
            raise
        failed = error
    order = sorted(range(len(needs)), key=lambda i: (-needs[i], i))
    candidates = [i for i in order if batch.sequences[i].key not in carried][: len(order) - 1]
    room = planner.config.max_waves * planner.menu.topology.world_size * planner.menu.cap_mib
    count, step = _least_count([needs[i] for i in candidates], sum(needs) - room), 1
    while candidates:
        count = min(count, len(candidates))
        try:
            return _without(planner, batch, set(candidates[:count]))
        except PlanningError as error:
            failed = error
        if count == len(candidates):
            break
        count, step = count + step, 2 * step
    raise failed


def _least_count(needs: list[int], excess: int) -> int:
    """How many of the largest needs add up to `excess` at least; one at the least."""
    for count in range(1, len(needs)):
        if sum(needs[:count]) >= excess:
            return count
    return max(1, len(needs))


def _without(planner: BatchPlanner, batch: GlobalBatch, waiting: set[int]) -> PlannedBatch:
    rest, deferred = withhold(batch, waiting)
    waves = tuple(plan_waves(planner, rest, planner.config.max_waves))
    return PlannedBatch(rest, waves, tuple(sorted(waiting)), deferred)
