"""A running average of the weights (EMA) under every strategy, sharded ones included."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed.checkpoint as dcp
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from zellige_lightning.sharding import reshard


class WeightAverage(EMAWeightAveraging):
    """Lightning's callback: the average is used for validation, samples and what comes after training, and is
    in the checkpoint as `state_dict`, with the trained weights beside it as `current_model_state`.

    Lightning's own cannot copy a module that is sharded. Here each rank then averages its own shards, once
    the strategy has made them, and both states are parts of the checkpoint folder. And it writes the average
    for the trained weights, which are lost, where a checkpoint is saved while the module holds the average:
    at the end of training, or because a validation fails. Here both change places, and stay apart.

    Args:
        decay: of the average, per optimizer step.
    """

    def __init__(self, decay: float = 0.9999) -> None:
        super().__init__(use_buffers=False, decay=decay)
        self._in_use, self._ended = False, False  # the module holds the average; for good

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._in_use = self._ended = False
            self._device = trainer.strategy.root_device  # where the module goes, which is not there yet
        if isinstance(trainer.strategy, ModelParallelStrategy):
            return
        with (
            warnings.catch_warnings()
        ):  # said of every module with `configure_model`, whether it shards or not
            warnings.filterwarnings(
                "ignore", message="You're using the WeightAveraging callback with a model"
            )
            super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, ModelParallelStrategy):
            self._average_model = AveragedModel(_Shards(pl_module), **self._kwargs)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._in_use:
            self._swap_models(pl_module)
        self._ended = True

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._average_model is None or self._ended:
            return
        if not self._average_model.n_averaged:  # weights may have been read since it was made
            self._start_anew(pl_module)
        self._swap_models(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._ended:
            super().on_validation_epoch_end(trainer, pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if not self._is_sharded:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
        else:
            assert self._average_model is not None
            checkpoint["current_model_state"] = checkpoint["state_dict"]
            checkpoint["state_dict"] = self._shards_by_name(pl_module)
            checkpoint["averaging_state"] = {"n_averaged": self._average_model.n_averaged.cpu()}
        if self._in_use:
            trained, average = checkpoint["state_dict"], checkpoint["current_model_state"]
            checkpoint["state_dict"], checkpoint["current_model_state"] = average, trained

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._average_model is None:  # nothing is fitted: the strategy loads the average
            return
        if not self._is_sharded:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
            return
        assert self._average_model is not None
        if "averaging_state" in checkpoint:  # the strategy has loaded the average into the module
            current = {name: parameter.detach() for name, parameter in pl_module.named_parameters()}
            tensors = {"state_dict": self._shards_by_name(pl_module), "current_model_state": current}
            dcp.load(tensors, checkpoint_id=trainer.ckpt_path)
            self._average_model.n_averaged.copy_(checkpoint["averaging_state"]["n_averaged"])
        else:
            self._start_anew(pl_module)

    @property
    def _is_sharded(self) -> bool:
        return self._average_model is not None and isinstance(self._average_model.module, _Shards)

    def _start_anew(self, pl_module: LightningModule) -> None:
        for average, parameter in self._pairs(pl_module):
            average.data.copy_(parameter.data)

    def _pairs(self, pl_module: LightningModule) -> list[tuple[Tensor, Tensor]]:
        assert self._average_model is not None
        return list(zip(self._average_model.module.parameters(), pl_module.parameters(), strict=True))

    def _shards_by_name(self, pl_module: LightningModule) -> dict[str, Tensor]:
        names = [name for name, _ in pl_module.named_parameters()]
        return {n: average.detach() for n, (average, _) in zip(names, self._pairs(pl_module), strict=True)}

    def _swap_models(self, pl_module: LightningModule) -> None:
        reshard(pl_module)
        super()._swap_models(pl_module)
        self._in_use = not self._in_use


class _Shards(nn.Module):
    """Copies of a module's parameters and buffers as they lie on this rank."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.copies = nn.ParameterList([p.detach().clone() for p in module.parameters()])
        for number, buffer in enumerate(module.buffers()):
            self.register_buffer(str(number), buffer.detach().clone())
