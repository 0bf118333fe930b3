"""`ZelligeDataModule` wraps a DataModule: it buckets its samples into global batches and resolves each
batch, in `on_before_batch_transfer`, to the tokens that the plan gives this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Rows
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.evaluation import EvaluationLoader, EvaluationWave, LocalStep, PlannedEvaluationLoader
from zellige_lightning.loader import GlobalBatchLoader
from zellige_lightning.lookahead import PendingStep
from zellige_lightning.placement import Bucket, Catalog, GlobalBatch
from zellige_lightning.sources import DatasetSource, GlobalBatchSampler, Sample, TokenSource
from zellige_lightning.sources.adaptive_load import AdaptiveLoad, AdaptiveLoadSampler
from zellige_lightning.stream import StreamLoader, is_stream

Tokenize = Callable[[Any], tuple[Mapping[str, Tensor], Mapping[str, Tensor]]]


class ZelligeDataModule(LightningDataModule):
    """Global batches of mixed images and videos, from any DataModule with map-style datasets.

    Args:
        datamodule: its dataloaders are asked only for their datasets. A dataset that is a `TokenSource` is
            read by token ranges; any other map-style dataset needs `describe` and `tokenize`.
        catalog: expected buckets; default, those that occur in the training samples.
        tokens_per_batch: token budget of a global batch, over all ranks.
        tokens_per_rank: the budget as so many tokens for each rank of the job that starts the training. It
            stays that of the global batch: checkpoints keep it, and on another number of ranks the same
            batches train, in waves where they do not fit. Give one of the two.
        video_token_share: target share of video tokens in a batch; None takes samples as they come.
        seed: of the order of samples.
        loss_reduction: `sequence` weighs every sequence alike, `token` every token.
        adaptive_load: AdaptiveLoad's sampler form, `{exponent, ranks}`: every rank's share of a batch is of
            one bucket, as many as its memory (`tokens_per_batch` over the ranks) and compute allow. The
            share of video tokens is then that of the samples.
        plan_evaluation: place the sequences of validation, test and prediction by plan as well, so that what
            does not fit on one rank is split. Otherwise they run whole and nothing is planned or profiled for
            them.
        batches_per_epoch: global batches that count as an epoch of a stream (an `IterableDataset`, or a
            `LanedStream`); None for anything else.
        describe: index of an item -> `Sample` (key and grid), without decoding it; where training is from a
            stream, the item itself, also of a map-style dataset that is evaluated.
        tokenize: item -> (token fields with one row per token, fields with one value per sequence).
    """

    def __init__(
        self,
        datamodule: LightningDataModule,
        catalog: Catalog | Mapping[str, Any] | None = None,
        *,
        tokens_per_batch: int | None = None,
        tokens_per_rank: int | None = None,
        video_token_share: float | None = None,
        seed: int = 0,
        loss_reduction: str = "sequence",
        adaptive_load: Mapping[str, Any] | None = None,
        batches_per_epoch: int | None = None,
        plan_evaluation: bool = False,
        describe: Callable[[Any], Sample] | None = None,
        tokenize: Tokenize | None = None,
    ) -> None:
        super().__init__()
        if loss_reduction not in ("sequence", "token"):
            raise ConfigError(f"loss_reduction={loss_reduction!r}", fix="use `sequence` or `token`")
        if (describe is None) != (tokenize is None):
            raise ConfigError("`describe` and `tokenize` belong together", fix="give both or none")
        if (tokens_per_batch is None) == (tokens_per_rank is None):
            raise ConfigError(
                f"tokens_per_batch={tokens_per_batch}, tokens_per_rank={tokens_per_rank}",
                fix="give the token budget of a global batch, or that of each rank, and not both",
            )
        self.inner = datamodule
        self._catalog = as_catalog(catalog)
        self._tokens_per_batch, self._tokens_per_rank = tokens_per_batch, tokens_per_rank
        self._video_token_share = video_token_share
        self._seed, self._loss_reduction = seed, loss_reduction
        self._adaptive_load = None if adaptive_load is None else AdaptiveLoad.of(adaptive_load)
        if self._adaptive_load is not None and video_token_share is not None:
            raise ConfigError(
                "adaptive_load draws videos and images as there are, so video_token_share cannot hold",
                fix="set video_token_share=null, or adaptive_load=null",
            )
        self._plan_evaluation = plan_evaluation
        self._describe, self._tokenize = describe, tokenize
        self._batches_per_epoch = batches_per_epoch
        self._train_loader: GlobalBatchLoader | None = None
        self._handed_out = False
        # Lightning prefers a data module's hook to the model's, so it must only see those that are really
        # there.
        for hook in ("transfer_batch_to_device", "on_after_batch_transfer"):
            if is_overridden(hook, datamodule, LightningDataModule):
                setattr(self, hook, getattr(datamodule, hook))
        self.prepare_data_per_node = datamodule.prepare_data_per_node
        self.allow_zero_length_dataloader_with_multiple_devices = (
            datamodule.allow_zero_length_dataloader_with_multiple_devices
        )

    # ---- batches -------------------------------------------------------------------------------------------

    @property
    def tokens_per_batch(self) -> int:
        """Token budget of a global batch."""
        if self._tokens_per_batch is None:
            assert self._tokens_per_rank is not None
            return self._tokens_per_rank * (self.trainer.world_size if self.trainer is not None else 1)
        return self._tokens_per_batch

    def go_on_with(self, tokens_per_batch: int) -> None:
        """Keep the budget of the training that is resumed, whatever this job's ranks or settings are."""
        if self._tokens_per_batch not in (None, tokens_per_batch):
            rank_zero_warn(
                f"the resumed training has {tokens_per_batch} tokens in a global batch and keeps them;"
                f" tokens_per_batch={self._tokens_per_batch} is for a training that starts"
            )
        if tokens_per_batch != self.tokens_per_batch:
            self._train_loader = None
        self._tokens_per_batch = tokens_per_batch

    def training_loader(self) -> GlobalBatchLoader:
        """The loader of the training samples."""
        if self._train_loader is None:
            self._train_loader = self._loader(self.inner.train_dataloader(), training=True)
            self._handed_out = False
        return self._train_loader

    def train_dataloader(self) -> GlobalBatchLoader:
        """Asked again within a fit, it asks the wrapped module again
        (`reload_dataloaders_every_n_epochs`)."""
        if self._handed_out:
            self._train_loader = None
        loader = self.training_loader()
        self._handed_out = True
        return loader

    def val_dataloader(self) -> Any:
        return self._evaluation(self.inner.val_dataloader)

    def test_dataloader(self) -> Any:
        return self._evaluation(self.inner.test_dataloader)

    def predict_dataloader(self) -> Any:
        return self._evaluation(self.inner.predict_dataloader)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """A planned batch becomes this rank's `RankBatch`; anything else passes as it came."""
        if isinstance(batch, PendingStep):
            batch = self._strategy().take(batch)
        elif isinstance(batch, LocalStep | EvaluationWave):
            batch = batch.read(self.trainer.precision_plugin if self.trainer is not None else Precision())
        elif isinstance(batch, GlobalBatch):
            raise ConfigError(
                "a global batch arrived without a plan",
                fix='train with Trainer(strategy="zellige"); other strategies cannot place sequences',
                step=batch.step,
            )
        hook = "on_before_batch_transfer"
        model = self.trainer.lightning_module if self.trainer is not None else None
        owner = self.inner if model is None or is_overridden(hook, self.inner, LightningDataModule) else model
        return type(owner).on_before_batch_transfer(owner, batch, dataloader_idx)

    def _strategy(self) -> Any:
        from zellige_lightning.placing import PlacingStrategy

        assert self.trainer is not None
        strategy = self.trainer.strategy
        if not isinstance(strategy, PlacingStrategy):
            raise ConfigError(
                f"a planned batch under {type(strategy).__name__}", fix='use strategy="zellige"'
            )
        return strategy

    def _loader(self, dataloaders: Any, *, training: bool) -> GlobalBatchLoader:
        dataset = getattr(dataloaders, "dataset", dataloaders)
        if is_stream(dataset):
            return self._stream_loader(dataset, training)
        source = self._source(dataloaders)
        catalog = self._catalog or _catalog_of(source.samples)
        sampler = self._sampler(source, catalog, training)
        return GlobalBatchLoader(source, sampler, catalog, self._loss_reduction)

    def _stream_loader(self, stream: Any, training: bool) -> StreamLoader:
        if not training:
            raise ConfigError(
                f"{type(stream).__name__} is a stream, which cannot be evaluated",
                fix="evaluate a map-style dataset: the same samples every time",
            )
        if self._describe is None or self._tokenize is None or self._catalog is None:
            raise ConfigError(
                f"{type(stream).__name__} is a stream: what it will bring is not known",
                fix="give `catalog`, `describe` and `tokenize` (both of an item), and `batches_per_epoch`",
            )
        if self._batches_per_epoch is None or self._video_token_share is not None:
            raise ConfigError(
                f"a stream with batches_per_epoch={self._batches_per_epoch},"
                f" video_token_share={self._video_token_share}",
                fix="give the number, and no share: samples are taken as they come",
            )
        return StreamLoader(
            stream,
            self._catalog,
            self._describe,
            self._tokenize,
            tokens_per_batch=self.tokens_per_batch,
            batches_per_epoch=self._batches_per_epoch,
            loss_reduction=self._loss_reduction,
        )

    def _sampler(self, source: TokenSource, catalog: Catalog, training: bool) -> GlobalBatchSampler:
        budget, seed = self.tokens_per_batch, self._seed
        if training and self._adaptive_load is not None:
            return AdaptiveLoadSampler(
                source.samples, catalog, self._adaptive_load, tokens_per_batch=budget, seed=seed
            )
        return GlobalBatchSampler(
            source.samples,
            catalog,
            tokens_per_batch=budget,
            video_token_share=self._video_token_share if training else None,
            seed=seed,
            shuffle=training,
        )

    def _source(self, dataloader: Any) -> TokenSource:
        dataset = getattr(dataloader, "dataset", dataloader)
        if isinstance(dataset, TokenSource):
            return dataset
        if self._describe is not None and self._tokenize is not None:
            beside_stream = self._batches_per_epoch is not None
            describe = _of_items(self._describe, dataset) if beside_stream else self._describe
            return DatasetSource(dataset, describe, self._tokenize)
        raise DataError(
            f"dataset {type(dataset).__name__} cannot be read by token ranges",
            fix="implement `TokenSource`, or pass `describe` and `tokenize` to ZelligeDataModule",
        )

    def _evaluation(self, dataloaders: Callable[[], Any]) -> Any:
        """Whole sequences, dealt to the ranks, or planned ones."""
        try:
            inner = dataloaders()
        except MisconfigurationException:  # the wrapped module has none of that kind
            return []
        if isinstance(inner, list | tuple):
            return [self._share(loader) for loader in inner]
        return [] if inner is None else self._share(inner)

    def _share(self, dataloader: Any) -> EvaluationLoader | PlannedEvaluationLoader:
        if self._plan_evaluation and self.trainer is not None:
            self._strategy()  # must be one that plans
            return PlannedEvaluationLoader(self._loader(dataloader, training=False))
        rank, world_size = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        return EvaluationLoader(self._loader(dataloader, training=False), rank, world_size)

    # ---- everything else is the wrapped module's -----------------------------------------------------------

    def prepare_data(self) -> None:
        self.inner.trainer = self.trainer
        self.inner.prepare_data()

    def setup(self, stage: str) -> None:
        self.inner.trainer = self.trainer
        self._train_loader = None
        self.inner.setup(stage)

    def teardown(self, stage: str) -> None:
        self.inner.teardown(stage)

    def on_exception(self, exception: BaseException) -> None:
        self.inner.on_exception(exception)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)


def _of_items(describe: Callable[[Any], Sample], dataset: Any) -> Callable[[int], Sample]:
    return lambda index: describe(dataset[index])


def as_catalog(catalog: Catalog | Mapping[str, Any] | None) -> Catalog | None:
    """A catalog from what a configuration says: `{buckets: {name: [T, H, W], ...}, strict: false}`.

    Raises:
        ConfigError: unknown keys.
    """
    if catalog is None or isinstance(catalog, Catalog):
        return catalog
    if unknown := set(catalog) - {"buckets", "strict"}:
        raise ConfigError(
            f"unknown catalog settings {sorted(unknown)}", fix="known are `buckets` and `strict`"
        )
    buckets = tuple(Bucket(name, tuple(grid)) for name, grid in (catalog.get("buckets") or {}).items())
    return Catalog(buckets, bool(catalog.get("strict", False))) if buckets else None


def _catalog_of(samples: Rows[Sample]) -> Catalog:
    """One bucket per shape that occurs."""
    if not samples:
        raise DataError("there is no sample to train on", fix="check the data path and the filters")
    grids = sorted({sample.grid for sample in samples})
    kinds = {True: "video", False: "image"}
    return Catalog(tuple(Bucket(f"{kinds[g[0] > 1]}-{g[0]}x{g[1]}x{g[2]}", g) for g in grids))
