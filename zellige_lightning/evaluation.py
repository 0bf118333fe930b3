"""Validation, test and prediction on planned batches: what does not fit on one rank is split there too."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lightning.pytorch.plugins.precision import Precision

from zellige_lightning.batch import RankBatch
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
