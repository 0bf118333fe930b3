"""Validation, test and prediction: whole sequences dealt to the ranks, or planned batches, in which what does
not fit on one rank is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightning.pytorch.plugins.precision import Precision

from zellige_lightning.batch import RankBatch, local_batch
from zellige_lightning.loader import GlobalBatchLoader
from zellige_lightning.placement import GlobalBatch

Planning = Callable[[GlobalBatchLoader, GlobalBatch], list[RankBatch]]


class EvaluationWave:
    """This rank's part of a planned wave. A class of its own, so that half-precision plugins, which would
    cast its loss weights, pass it by."""

    def __init__(self, batch: RankBatch) -> None:
        self._batch = batch

    def read(self, precision: Precision) -> RankBatch:
        """Its tokens, in the precision of the run."""
        self._batch.tokens = precision.convert_input(self._batch.tokens)
        self._batch.context = precision.convert_input(self._batch.context)
        return self._batch


class PlannedEvaluationLoader:
    """Every evaluation batch on all ranks, each wave of it a step of its own; so all ranks have equally many.

    Has no length, since the number of waves is known only once a batch is planned. Planning is a collective,
    in the main thread; the strategy sets `plan`.
    """

    def __init__(self, loader: GlobalBatchLoader) -> None:
        self.loader = loader
        self.plan: Planning | None = None

    def __iter__(self) -> Iterator[EvaluationWave]:
        assert self.plan is not None, "the strategy has not seen this loader"
        for batch in self.loader.epoch_batches(0, window=1, limit=len(self.loader)):
            for wave in self.plan(self.loader, batch):
                yield EvaluationWave(wave)


class LocalStep:
    """What an `EvaluationLoader` yields: a batch of whole sequences that is read in the hook, past the
    half-precision plugins, which would cast its loss weights."""

    def __init__(self, batch: GlobalBatch, loader: GlobalBatchLoader) -> None:
        self.batch, self._loader = batch, loader

    def read(self, precision: Precision) -> RankBatch:
        """Its tokens, in the precision of the run."""
        batch = local_batch(self.batch, self._loader.source, self._loader.loss_reduction)
        batch.tokens = precision.convert_input(batch.tokens)
        batch.context = precision.convert_input(batch.context)
        return batch


class EvaluationLoader:
    """This rank's share of the evaluation batches. Nothing is split; all ranks have equally many batches,
    so that none waits for another in a synchronized metric."""

    def __init__(self, loader: GlobalBatchLoader, rank: int, world_size: int) -> None:
        self.loader = loader
        batches = loader.epoch_batches(0, window=1, limit=len(loader))
        self._batches = _even_out(batches, world_size)[rank::world_size]

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[LocalStep]:
        for batch in self._batches:
            yield LocalStep(batch, self.loader)


def _even_out(batches: list[GlobalBatch], multiple: int) -> list[GlobalBatch]:
    """The same sequences in a number of batches that `multiple` divides: large batches are halved; once
    all hold a single sequence, empty ones are added."""
    keys = [[(s.key, s.bucket) for s in batch.sequences] for batch in batches]
    while len(keys) % multiple:
        largest = max(range(len(keys)), key=lambda i: len(keys[i]))
        items = keys[largest]
        half = (len(items) + 1) // 2
        keys[largest] = items[:half]
        keys.append(items[half:])
    return [GlobalBatch.of(step, 0, items) for step, items in enumerate(keys)]
