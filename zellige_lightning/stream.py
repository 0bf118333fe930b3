"""Samples that come as a stream: global batches that are drawn as training goes.

A stream has lanes, a fixed number of them whatever the ranks: rank r of N reads the lanes r, r + N, ... The
order of all samples takes one of each lane in turn, so it does not depend on the number of ranks either.
Every rank tells the others key and grid of its next samples; what they hold stays where it was read until the
batch is planned (`routed.py`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset

from zellige_lightning.agreement import Agreement
from zellige_lightning.errors import DataError, ZelligeError
from zellige_lightning.loader import GlobalBatchLoader
from zellige_lightning.placement import Bucket, Catalog, GlobalBatch, Plan, Sequence
from zellige_lightning.routed import route
from zellige_lightning.sources import FieldSpec, Sample, SyntheticSource, TokenSource
from zellige_lightning.sources.dataset import Loaded

_TOLD = 8  # samples of a lane that are announced at a time


@runtime_checkable
class LanedStream(Protocol):
    """A stream that can be read in several places at once."""

    @property
    def num_lanes(self) -> int:
        """The same in every job that reads the stream; at least the number of ranks that are to read."""
        ...

    def lane(self, number: int, pass_number: int) -> Iterator[Any]:
        """The items of one lane; all lanes together are the stream. The order may differ by pass, but is the
        same whenever that pass is read again."""
        ...


class OneLane:
    """Any iterable as a stream of a single lane: rank 0 reads it, and rows go to all."""

    num_lanes = 1

    def __init__(self, items: Any) -> None:
        self._items = items

    def lane(self, number: int, pass_number: int) -> Iterator[Any]:
        if callable(set_epoch := getattr(self._items, "set_epoch", None)):
            set_epoch(pass_number)
        return iter(self._items)


def is_stream(dataset: Any) -> bool:
    return isinstance(dataset, LanedStream | IterableDataset)


@dataclass
class _Lane:
    """What is known of a lane: announced samples that are not drawn and, where it is read, their items."""

    told: deque[Sample] = field(default_factory=deque)
    ended: bool = False
    items: deque[Any] = field(default_factory=deque)
    source: Iterator[Any] | None = None


@dataclass
class _Drawn:
    """A sample in a batch, the rank that has it, and its item there."""

    sample: Sample
    bucket: Bucket
    owner: int
    item: Any


class StreamLoader(GlobalBatchLoader):
    """A stream as a loader of global batches, which are empty until `drawn` fills them.

    Samples come in the order of the stream; one that does not fit any more begins the next batch. A stream
    that ends starts over: an epoch is a number of batches, not a pass. What a resumed run has trained is read
    again and passed over.

    Args:
        stream: what is read; any iterable is a stream of one lane.
        describe: item -> `Sample`, without decoding. tokenize: item -> (token fields, sequence fields).
        batches_per_epoch: global batches that trainers take for an epoch.
    """

    def __init__(
        self,
        stream: Any,
        catalog: Catalog,
        describe: Callable[[Any], Sample],
        tokenize: Callable[[Any], Loaded],
        *,
        tokens_per_batch: int,
        batches_per_epoch: int,
        loss_reduction: str,
    ) -> None:
        self.catalog, self.loss_reduction = catalog, loss_reduction
        self._stream: LanedStream = stream if isinstance(stream, LanedStream) else OneLane(stream)
        self._describe, self._tokenize = describe, tokenize
        self._budget, self._num_batches, self._epoch_size = tokens_per_batch, batches_per_epoch, 1
        self._counts: dict[str, int] = {}
        self._held: dict[str, _Drawn] = {}
        self._start_over()
        tokens, sequence = self._load(next(iter(self._stream.lane(0, 0)), None))
        self.source = SyntheticSource(
            {n: FieldSpec(tuple(t.shape[1:]), t.dtype) for n, t in tokens.items()},
            {n: FieldSpec(tuple(t.shape), t.dtype) for n, t in sequence.items()},
        )

    def _start_over(self) -> None:
        self._pass, self._turn, self._next_step = 0, 0, 0
        self._batches: dict[int, tuple[GlobalBatch, list[_Drawn]]] = {}
        self._lanes = [_Lane() for _ in range(self._stream.num_lanes)]
        self._held.clear()

    def __len__(self) -> int:
        return self._num_batches

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of the catalog, smallest first: nobody knows what a stream still brings."""
        return tuple(sorted(self.catalog.buckets, key=lambda b: (b.num_tokens, b.name)))

    def counts(self) -> dict[str, int]:
        """Number of samples so far by bucket name."""
        return dict(self._counts)

    def epoch_batches(self, epoch: int, window: int, limit: int) -> list[GlobalBatch]:
        """The batches of an epoch by number, still empty."""
        self._epoch_size = size = min(limit, len(self))
        return [GlobalBatch(epoch * size + i, epoch, (), 0, 0) for i in range(size)]

    # ---- drawing: the same on all ranks -------------------------------------------------------------------

    def drawn(self, batch: GlobalBatch, window: int, agreement: Agreement) -> GlobalBatch:
        """That batch with its samples. A collective; batches are asked for in ascending order.

        Raises:
            DataError: a stream that fails on some rank or has no sample; on all ranks.
        """
        if batch.step < self._next_step and batch.step not in self._batches:
            self._start_over()
        while batch.step not in self._batches:
            self._draw_window(window, agreement)
        for passed in [step for step in self._batches if step < batch.step]:
            del self._batches[passed]
        filled, samples = self._batches.pop(batch.step)
        self._held.update({drawn.sample.key: drawn for drawn in samples})
        for drawn in samples:
            self._counts[drawn.bucket.name] = self._counts.get(drawn.bucket.name, 0) + 1
        return filled

    def _draw_window(self, window: int, agreement: Agreement) -> None:
        """The batches of the accumulation window that begins with the next one."""
        epoch, index = divmod(self._next_step, self._epoch_size)
        size = min(window - index % window, self._epoch_size - index)
        part = [self._draw(agreement) for _ in range(size)]
        buckets = [drawn.bucket for samples in part for drawn in samples]
        for samples in part:
            sequences = tuple(Sequence(i, d.sample.key, d.bucket) for i, d in enumerate(samples))
            tokens = sum(bucket.num_tokens for bucket in buckets)
            batch = GlobalBatch(self._next_step, epoch, sequences, len(buckets), tokens)
            self._batches[self._next_step] = batch, samples
            self._next_step += 1

    def _draw(self, agreement: Agreement) -> list[_Drawn]:
        """The samples of one batch."""
        samples: list[_Drawn] = []
        room = self._budget
        while True:
            number = self._next_lane(agreement)
            lane = self._lanes[number]
            bucket = self.catalog.bucket_for(lane.told[0].grid)
            known = {drawn.sample.key for drawn in samples}
            if samples and (bucket.num_tokens > room or lane.told[0].key in known):
                return samples
            item = lane.items.popleft() if lane.items else None
            samples.append(_Drawn(lane.told.popleft(), bucket, number % agreement.world_size, item))
            room -= bucket.num_tokens
            self._turn += 1

    def _next_lane(self, agreement: Agreement) -> int:
        """The lane whose turn it is, its next sample announced."""
        while True:
            lane = self._lanes[self._turn % len(self._lanes)]
            if lane.told:
                return self._turn % len(self._lanes)
            if not lane.ended:
                self._announce(agreement)
            elif all(lane.ended and not lane.told for lane in self._lanes):
                self._begin_pass()
            else:
                self._turn += 1

    def _begin_pass(self) -> None:
        if self._turn == 0:
            raise DataError("the stream has no sample", fix="check the path and the filters of the dataset")
        self._pass, self._turn = self._pass + 1, 0
        self._lanes = [_Lane() for _ in self._lanes]

    def _announce(self, agreement: Agreement) -> None:
        """Every rank tells the next samples of those of its lanes that have none told."""
        mine = agreement.together(lambda: self._read_ahead(agreement.rank, agreement.world_size))
        for rank in range(agreement.world_size):
            told = json.loads(agreement.share(mine if rank == agreement.rank else None, rank))
            for number, (samples, ended) in told.items():
                lane = self._lanes[int(number)]
                lane.told.extend(Sample(key, tuple(grid)) for key, grid in samples)
                lane.ended = ended

    def _read_ahead(self, rank: int, world_size: int) -> str:
        told = {}
        for number in range(rank, len(self._lanes), world_size):
            lane = self._lanes[number]
            if lane.told or lane.ended:
                continue
            lane.source = lane.source or iter(self._stream.lane(number, self._pass))
            items = list(islice(lane.source, _TOLD))
            lane.items.extend(items)
            samples = [self._describe(item) for item in items]
            told[number] = [[s.key, list(s.grid)] for s in samples], len(items) < _TOLD
        return json.dumps(told)

    # ---- reading -------------------------------------------------------------------------------------------

    def routed(
        self, placed: Callable[[], list[tuple[GlobalBatch, Plan]]], agreement: Agreement
    ) -> TokenSource:
        """What the plans give this rank, from the ranks that hold it. A collective.

        Args:
            placed: the plans, the same on all ranks; a collective.

        Raises:
            DataError: a sample that cannot be read, on all ranks.
        """
        waves = placed()
        owners = {key: drawn.owner for key, drawn in self._held.items()}
        if lost := [s.key for batch, _ in waves for s in batch.sequences if s.key not in owners]:
            raise DataError(
                f"samples {lost[:3]} of a stream waited for this batch when the checkpoint was saved",
                fix="resume from another checkpoint, and leave planner.defer off for streams",
            )
        arrived = route(waves, owners, self._load_held, self.source, agreement)
        for batch, _ in waves:
            for sequence in batch.sequences:
                del self._held[sequence.key]
        return arrived

    def _load_held(self, key: str) -> Loaded:
        return self._load(self._held[key].item)

    def _load(self, item: Any) -> Loaded:
        if item is None:
            raise DataError("the stream has no sample", fix="check the path and the filters of the dataset")
        try:
            return self._tokenize(item)
        except ZelligeError:
            raise
        except Exception as error:
            raise DataError(
                f"sample {self._describe(item).key!r} cannot be read: {type(error).__name__}: {error}",
                fix="repair or remove the sample, or correct `tokenize`",
            ) from error
