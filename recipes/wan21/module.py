"""The LightningModule: Wan2.1 pretraining by flow matching on planned batches."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from zellige_lightning import CoalescedAttentionMixin
from zellige_lightning.batch import RankBatch
from zellige_lightning.errors import ConfigError
from zellige_lightning.recipes.wan21.config import WanConfig, named_config
from zellige_lightning.recipes.wan21.flow import FlowMatching, per_token_loss
from zellige_lightning.recipes.wan21.model import WanModel


class WanModule(CoalescedAttentionMixin, LightningModule):
    """Trains a `WanModel` on batches with token field `latents` `[T, 64]` and sequence field `text`.

    Args:
        model: name of a size (`tiny`, `demo`, `wan21_1_3b`, `wan21_14b`) or a configuration.
        flow: the objective; default: shift 3, logit-normal times, one caption of ten dropped.
        lr, betas, weight_decay: of AdamW. warmup_steps: optimizer steps over which the rate rises linearly.
        activation_checkpointing: recompute each block in backward.
        meta_device: build the model without memory for its parameters; the strategy gives them theirs, and
            their initial values, when they are sharded.

    Raises:
        ConfigError: an unknown size, or a rate or warm-up that is out of range.
    """

    coalesced_attention = ("model.blocks.*.self_attn",)

    def __init__(
        self,
        model: str | WanConfig = "wan21_1_3b",
        flow: FlowMatching | None = None,
        *,
        lr: float = 5e-5,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        activation_checkpointing: bool = False,
        meta_device: bool = False,
    ) -> None:
        super().__init__()
        if lr <= 0.0 or warmup_steps < 0 or weight_decay < 0.0:
            raise ConfigError(
                f"lr={lr}, warmup_steps={warmup_steps}, weight_decay={weight_decay}",
                fix="the rate is positive, the other two are not negative",
            )
        config = named_config(model) if isinstance(model, str) else model
        with torch.device("meta") if meta_device else nullcontext():
            self.model = WanModel(config, activation_checkpointing=activation_checkpointing)
        self.flow = flow or FlowMatching()
        self.lr, self.betas, self.weight_decay = lr, (betas[0], betas[1]), weight_decay
        self.warmup_steps = warmup_steps
        self._validation = torch.zeros(2, 2)

    def init_weights(self, submodule: nn.Module) -> None:
        """Initial values of what one submodule holds itself; for models that were built without memory."""
        self.model.init_module(submodule)

    def training_step(self, batch: RankBatch, batch_idx: int) -> Tensor:
        loss = batch.reduce(self.per_token_loss(batch, self.flow, batch.epoch))
        self.log("loss", loss, prog_bar=True)
        return loss

    def per_token_loss(self, batch: RankBatch, flow: FlowMatching, draw: int) -> Tensor:
        """Loss of each local token, `[T]`.

        Args:
            flow, draw: noise, time and caption drop are those of this objective's draw number `draw`.
        """
        ranges = [segment.tokens for segment in batch.segments]
        inputs = flow.inputs(draw, batch.sequences, ranges, batch.tokens["latents"])
        text = batch.context["text"].masked_fill(inputs.dropped[:, None, None], 0.0)  # as an empty caption
        velocity = self.model(
            inputs.tokens, batch.positions, batch.segment_ids, inputs.timesteps, text, batch.lengths
        )
        return per_token_loss(velocity, inputs.target)

    def on_validation_epoch_start(self) -> None:
        self._validation = torch.zeros(
            2, 2, device=self.device
        )  # rows: images, videos; columns: loss, samples

    def validation_step(self, batch: RankBatch, batch_idx: int) -> None:
        """Adds up the loss of each sample; a part of a sample counts as that part of one."""
        losses = self.per_token_loss(batch, self.flow.for_evaluation(0), draw=0)
        for part, segment, sequence in zip(
            losses.split(batch.lengths), batch.segments, batch.sequences, strict=True
        ):
            share = len(segment) / segment.num_tokens
            self._validation[int(sequence.bucket.is_video), 0] += part.sum() / segment.num_tokens
            self._validation[int(sequence.bucket.is_video), 1] += share

    def on_validation_epoch_end(self) -> None:
        """One exchange for all ranks, whatever samples each of them had."""
        total = self.trainer.strategy.reduce(self._validation, reduce_op="sum")
        for name, (loss, count) in zip(("image", "video"), total.tolist(), strict=True):
            if count > 0:
                self.log(f"val_loss_{name}", loss / count, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.lr, betas=self.betas, weight_decay=self.weight_decay
        )
        warmup = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / max(1, self.warmup_steps))
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}
