"""The LightningModule: Wan2.1 pretraining by flow matching on planned batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from zellige_lightning import CoalescedAttentionMixin
from zellige_lightning.batch import RankBatch
from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.bucket_losses import BucketLosses
from zellige_lightning.recipes.wan21.config import WanConfig, named_config
from zellige_lightning.recipes.wan21.flow import FlowMatching, per_token_loss
from zellige_lightning.recipes.wan21.model import WanModel
from zellige_lightning.recipes.wan21.sampler import SamplerSettings, sample_batch
from zellige_lightning.recipes.wan21.schedule import RateSchedule
from zellige_lightning.recipes.wan21.start import start_from
from zellige_lightning.sharding import materialize

# In checkpoints: whether the parameters are already those that training starts from.
_STARTED = "wan21_started"


class WanModule(CoalescedAttentionMixin, LightningModule):
    """Trains a `WanModel` on batches with token field `latents` `[T, 64]` and sequence field `text`.

    Args:
        model: name of a size (`tiny`, `demo`, `wan21_1_3b`, `wan21_14b`) or a configuration.
        flow: the objective; default: shift 3, logit-normal times, one caption of ten dropped.
        weights: what training starts from: a file or folder of safetensors of either layout, or a repository
            of the Hugging Face hub. None starts from random values. Not read where a checkpoint is loaded.
        lr, betas, weight_decay: of AdamW.
        schedule, warmup_steps, decay_steps, min_lr_ratio: of the rate, see `RateSchedule`.
        activation_checkpointing: recompute each block in backward.
        meta_device: build the model without memory for its parameters; the strategy gives them theirs, and
            their initial values, when they are sharded.

    Raises:
        ConfigError: an unknown size, or a rate, a decay or a schedule that is out of range.
    """

    coalesced_attention = ("model.blocks.*.self_attn",)

    def __init__(
        self,
        model: str | WanConfig = "wan21_1_3b",
        flow: FlowMatching | None = None,
        *,
        weights: str | None = None,
        lr: float = 5e-5,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        schedule: str = "constant",
        warmup_steps: int = 100,
        decay_steps: int | None = None,
        min_lr_ratio: float = 0.0,
        activation_checkpointing: bool = False,
        meta_device: bool = False,
    ) -> None:
        super().__init__()
        if lr <= 0.0 or weight_decay < 0.0:
            raise ConfigError(
                f"lr={lr}, weight_decay={weight_decay}", fix="the rate is positive, the decay not negative"
            )
        self.rate = RateSchedule(schedule, warmup_steps, decay_steps, min_lr_ratio)
        config = named_config(model) if isinstance(model, str) else model
        # Weights that are read replace the initial ones, which then need neither time nor memory.
        with torch.device("meta") if meta_device or weights is not None else nullcontext():
            self.model = WanModel(config, activation_checkpointing=activation_checkpointing)
        self.flow = flow or FlowMatching()
        self.weights, self._weights_read = weights, False
        self.lr, self.betas, self.weight_decay = lr, (betas[0], betas[1]), weight_decay
        self._trained, self._validated = BucketLosses(), BucketLosses()
        self._logged_step = -1

    def configure_model(self) -> None:
        """Give parameters memory, unless the strategy is to shard them first."""
        strategy = self._trainer.strategy if self._trainer is not None else None
        if not isinstance(strategy, ModelParallelStrategy):
            materialize(self, self, strategy.root_device if strategy is not None else torch.device("cpu"))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Callbacks that try something out go back to a checkpoint from before `weights` were read."""
        checkpoint[_STARTED] = self.weights is None or self._weights_read

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What is loaded wins over `weights`, which may be gone by then."""
        self._weights_read = checkpoint.get(_STARTED, True)

    def on_train_start(self) -> None:
        """Read `weights`, into the shards of this rank where the model is sharded, unless a checkpoint was
        loaded, which is only known by now. A collective.

        Raises:
            DataError: on all ranks, if any of them cannot read the weights, or they do not fit.
        """
        self._read_weights()

    def on_validation_start(self) -> None:
        """As `on_train_start`, where validation comes first or alone."""
        self._read_weights()

    def _read_weights(self) -> None:
        if self.weights is not None and not self._weights_read:
            start_from(self.model, self.weights, self.device, self.trainer.local_rank)
            self._weights_read = True

    def init_weights(self, submodule: nn.Module) -> None:
        """Initial values of what one submodule holds itself; for models that were built without memory."""
        self.model.init_module(submodule)

    def training_step(self, batch: RankBatch, batch_idx: int) -> Tensor:
        per_token = self.per_token_loss(batch, self.flow, batch.epoch)
        self._trained.add(batch, per_token)
        loss = batch.reduce(per_token)
        self.log("loss", loss, prog_bar=True)
        return loss

    def per_token_loss(self, batch: RankBatch, flow: FlowMatching, draw: int) -> Tensor:
        """Loss of each local token, `[T]`.

        Args:
            flow, draw: noise, time and caption drop are those of this objective's draw number `draw`.

        Raises:
            DataError: samples that were encoded for another model.
        """
        self._check_widths(batch)
        ranges = [segment.tokens for segment in batch.segments]
        inputs = flow.inputs(draw, batch.sequences, ranges, batch.tokens["latents"])
        text = batch.context["text"].masked_fill(inputs.dropped[:, None, None], 0.0)  # as an empty caption
        velocity = self.model(
            inputs.tokens, batch.positions, batch.segment_ids, inputs.timesteps, text, batch.lengths
        )
        return per_token_loss(velocity, inputs.target) * inputs.weights[batch.segment_ids]

    def _check_widths(self, batch: RankBatch) -> None:
        config = self.model.config
        widths = {"latents": 4 * config.in_dim, "text": config.text_dim}
        found = {"latents": batch.tokens["latents"].shape[1], "text": batch.context["text"].shape[2]}
        if found != widths:
            raise DataError(
                f"the samples have {found['latents']} values in a token and {found['text']} in a row of their"
                f" captions, the model reads {widths['latents']} and {widths['text']}",
                fix="encode them with this model's VAE and text encoder; those of the demo's codec and texts"
                " train model.model=demo",
            )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log the losses by bucket, as often as the logger writes: means over the samples since then."""
        step = self.trainer.global_step
        if step % self.trainer.log_every_n_steps or step == self._logged_step:
            return
        self._logged_step = step
        for bucket, (_, loss, count) in self._trained.total().items():
            self.log(f"loss/{bucket}", loss / count, batch_size=1)

    def on_validation_epoch_start(self) -> None:
        self._validated = BucketLosses()

    def validation_step(self, batch: RankBatch, batch_idx: int) -> None:
        """Every sample has the same noise and time in each validation."""
        self._validated.add(batch, self.per_token_loss(batch, self.flow.for_evaluation(0), draw=0))

    def on_validation_epoch_end(self) -> None:
        """Means over samples, whatever samples each rank had: of buckets, of images and videos, of all."""
        kinds = {"val_loss": [0.0, 0.0], "val_loss_image": [0.0, 0.0], "val_loss_video": [0.0, 0.0]}
        for bucket, (is_video, loss, count) in self._validated.total().items():
            self.log(f"val_loss/{bucket}", loss / count, batch_size=1, sync_dist=True)
            for kind in ("val_loss", "val_loss_video" if is_video else "val_loss_image"):
                kinds[kind][0] += loss
                kinds[kind][1] += count
        for kind, (loss, count) in kinds.items():
            if count > 0.0:
                self.log(kind, loss / count, batch_size=1, sync_dist=True)

    def sample(self, batch: RankBatch, flow: FlowMatching, settings: SamplerSettings) -> Tensor:
        """See `sample_batch`. A method, so that strategies that shard the module can put it together."""
        return sample_batch(self.model, flow, batch, settings)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.rate(step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
