"""A training job of twenty steps that may be killed behind its checkpoint, for tests of exact resumption."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tests.invariance.subject import MemorySource, draw_parameters, make_module
from tests.lightning.toy import model_prices, whole_tensor, world_size
from tests.test_placement_invariance import make_sequence
from zellige_lightning import HardwareProfiler, ZelligeDataModule

STEPS, SAVED, KILLED = 20, 9, 12
GRIDS = [(3, 6, 10), (1, 4, 4), (1, 3, 5), (1, 1, 1), (5, 3, 3), (1, 2, 2), (1, 1, 7), (3, 2, 2)]


class Data(LightningDataModule):
    def train_dataloader(self) -> MemorySource:
        rng = random.Random(3)
        return MemorySource(tuple(make_sequence(rng, "wan", grid) for grid in GRIDS * 2), ("latents",))


class Diary(Callback):
    """What each step trained on, with which rate, and its loss."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, tuple[str, ...], float]] = []
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        keys = tuple(sequence.key for sequence in trainer.strategy.planned_step.batch.sequences)  # type: ignore[attr-defined]
        self.steps.append((batch.epoch, keys, trainer.optimizers[0].param_groups[0]["lr"]))

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *rest: Any) -> None:
        total = trainer.strategy.reduce(outputs["loss"].detach().double(), reduce_op="mean")
        self.losses.append(float(total))


class Killer(Callback):
    """At a step, rank 0 ends every process of the job, by its id and without any warning."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != KILLED:
            return
        processes = trainer.strategy.services.agreement.gather([os.getpid()])  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            for (process,) in reversed(processes):
                os.kill(process, signal.SIGKILL)


def make_wan() -> LightningModule:
    seed_everything(0, verbose=False)
    module = make_module("wan")
    module.load_state_dict(draw_parameters(module, 5), strict=False)
    module.lr, module.warmup_steps = 1e-3, 15  # type: ignore[assignment]
    return module


def run(rank: int, folder: str, strategy: str, resume: bool, kill: bool) -> dict[str, Any]:
    """Train to the last step, from the checkpoint if `resume`."""
    model_prices()
    torch.manual_seed(100 + rank)  # whatever a rank draws by itself must not matter
    diary = Diary()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    profile = HardwareProfiler(profile_path=str(Path(folder) / f"profile-{world_size()}.json"))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world_size(), max_steps=STEPS, precision="64-true",
        callbacks=[diary, profile, saving, *([Killer()] if kill else [])], logger=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, gradient_clip_val=0.5,
    )  # fmt: skip
    ours: Any = trainer.strategy  # made by name, which alone may be asked for double precision
    ours.planner_config = replace(ours.planner_config, online=False)  # measured times would change plans
    module = make_wan()
    data = ZelligeDataModule(Data(), tokens_per_batch=200, video_token_share=0.6)
    trainer.fit(module, data, ckpt_path=checkpoint_of(folder) if resume else None)
    return {"steps": diary.steps, "losses": diary.losses, "parameters": values_of(module)}


def checkpoint_of(folder: str | Path) -> str:
    return str(Path(folder) / f"step={SAVED}.ckpt")


def values_of(module: nn.Module) -> Any:
    """All parameters as one array, whole on every rank."""
    return torch.cat([whole_tensor(p).flatten() for p in module.parameters()]).numpy()
