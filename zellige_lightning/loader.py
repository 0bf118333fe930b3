"""The loader of a wrapped data module: an epoch as global batches, metadata only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from zellige_lightning.agreement import Agreement
from zellige_lightning.placement import Bucket, Catalog, GlobalBatch, Plan
from zellige_lightning.sources import GlobalBatchSampler, SyntheticSource, TokenSource


class GlobalBatchLoader:
    """Yields the global batches of epoch 0 when it is iterated by itself; a strategy asks for any epoch.

    Args:
        source: where tokens are read once they are planned.
        sampler: which samples make a batch.
        loss_reduction: `sequence` or `token`, see `materialize`.
    """

    def __init__(
        self, source: TokenSource, sampler: GlobalBatchSampler, catalog: Catalog, loss_reduction: str
    ) -> None:
        self.source, self.catalog, self.loss_reduction = source, catalog, loss_reduction
        self._sampler = sampler

    def __len__(self) -> int:
        return self._sampler.num_batches

    def __iter__(self) -> Iterator[GlobalBatch]:
        return iter(self.epoch_batches(0, window=1, limit=len(self)))

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets of the catalog and of all samples, smallest first."""
        known = set(self.catalog.buckets) | set(self._sampler.buckets)
        return tuple(sorted(known, key=lambda b: (b.num_tokens, b.name)))

    def counts(self) -> dict[str, int]:
        """Number of samples by bucket name."""
        return self._sampler.counts()

    def synthetic_source(self) -> SyntheticSource:
        """Random tokens with the fields of the real ones, for profiling: no disk, no sample of any key."""
        return SyntheticSource(self.source.token_fields, self.source.sequence_fields)

    def epoch_batches(self, epoch: int, window: int, limit: int) -> list[GlobalBatch]:
        """See `GlobalBatchSampler.epoch_batches`; batches are numbered through all epochs."""
        first_step = epoch * min(limit, len(self))
        return self._sampler.epoch_batches(epoch, first_step, window, limit)

    def drawn(self, batch: GlobalBatch, window: int, agreement: Agreement) -> GlobalBatch:
        """The batch with its samples, which here are known from the start."""
        return batch

    def routed(
        self, placed: Callable[[], list[tuple[GlobalBatch, Plan]]], agreement: Agreement
    ) -> TokenSource:
        """Where this rank reads what the plans give it: every rank reads all there is."""
        return self.source
