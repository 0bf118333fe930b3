"""Tokens per second and model FLOPs utilisation of whole steps, waiting and optimizer included."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from zellige_lightning.errors import ConfigError
from zellige_lightning.recipes.wan21.flops import model_flops
from zellige_lightning.recipes.wan21.module import WanModule

# Dense bf16 with fp32 accumulation, from the vendors' data sheets; a part of the device's name -> TFLOP/s.
_PEAK_TFLOPS = {
    "B200": 2250.0,
    "H800": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A800": 312.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX A6000": 154.8,
    "RTX 4090": 165.2,
}


class Throughput(Callback):
    """Logs, as often as the logger writes, over the time since the last time: `tokens_per_s` of all ranks,
    `tflops_per_device`, and `mfu` where the peak is known. Validation is not counted.

    FLOPs are three forwards of every sequence (`model_flops`): recomputation and padding earn nothing.

    Args:
        peak_tflops: of one device; None looks the device up.

    Raises:
        ConfigError: a peak that is not positive.
    """

    def __init__(self, peak_tflops: float | None = None) -> None:
        if peak_tflops is not None and not peak_tflops > 0.0:
            raise ConfigError(f"peak_tflops={peak_tflops}", fix="give TFLOP/s of one device, or null")
        self.peak_tflops = peak_tflops
        self._tokens, self._flops, self._seconds = 0, 0, 0.0
        self._began: float | None = None
        self._logged_step = -1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.peak_tflops is None:
            self.peak_tflops = peak_of(pl_module.device)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = None  # the first step of an epoch waits for its data

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._began = self._began or time.perf_counter()
        step = getattr(trainer.strategy, "planned_step", None)
        if step is None or not isinstance(pl_module, WanModule):
            return
        self._tokens += step.batch.num_tokens
        lengths = [sequence.num_tokens for sequence in step.batch.sequences]
        self._flops += model_flops(pl_module.model.config, lengths)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._began is not None
        now = time.perf_counter()
        self._seconds, self._began = self._seconds + now - self._began, now
        step = trainer.global_step
        if step % trainer.log_every_n_steps or step == self._logged_step or not self._tokens:
            return
        self._logged_step = step
        pl_module.log_dict(self._figures(trainer.world_size), batch_size=1)
        self._tokens, self._flops, self._seconds = 0, 0, 0.0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = None

    def _figures(self, world_size: int) -> dict[str, float]:
        tflops = self._flops / self._seconds / world_size / 1e12
        figures = {"tokens_per_s": self._tokens / self._seconds, "tflops_per_device": tflops}
        return figures | ({"mfu": tflops / self.peak_tflops} if self.peak_tflops is not None else {})


def peak_of(device: torch.device) -> float | None:
    """Peak TFLOP/s in bf16; None for a device that is not in the table, such as a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in _PEAK_TFLOPS.items() if part in name), None)
