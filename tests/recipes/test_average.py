"""The running average under sharded and whole parameters: the same, saved, and exact on resume."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from PIL import Image
from torch import Tensor

from tests.distributed import run_distributed
from tests.lightning.toy import make_trainer, model_prices
from tests.recipes.test_sampler import FLOW, data
from tests.recipes.weights.test_start import saved
from zellige_lightning import ZelligeFSDP2Strategy, ZelligeStrategy
from zellige_lightning.average import WeightAverage
from zellige_lightning.last_checkpoint import StepCheckpoint
from zellige_lightning.recipes.wan21.export import model_state, read_checkpoint
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.recipes.wan21.sample_media import SampleMedia

STRATEGIES = {"zellige": ZelligeStrategy, "zellige_fsdp2": ZelligeFSDP2Strategy}


class SavesWhileValidating(Callback):
    """As a checkpoint on an exception would: the module holds the average then."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_validation_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        trainer.save_checkpoint(self.path)


def fit(rank: int, name: str, folder: str, weights: str, resume: str | None = None) -> dict[str, Any]:
    """Three steps from `weights`, a checkpoint after each, validation and samples after the third, which
    `every_n_train_steps` of the last checkpoint does not divide."""
    model_prices()
    seed_everything(0, workers=True, verbose=False)
    module = WanModule("tiny", FLOW, weights=weights, lr=1e-2, warmup_steps=0)
    trainer = make_trainer(
        STRATEGIES[name](planner={"memory_cap_gib": 1.0}),
        max_steps=3, max_epochs=-1, limit_val_batches=None, val_check_interval=3,
        check_val_every_n_epoch=None, enable_checkpointing=True, default_root_dir=folder,
        callbacks=[
            WeightAverage(decay=0.5),
            SampleMedia("demo", num_images=1, num_videos=1, steps=2),
            ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
            StepCheckpoint(f"{folder}/last", filename="{step}", every_n_train_steps=2, save_last=True),
            SavesWhileValidating(f"{folder}/validated.ckpt"),
        ],
    )  # fmt: skip
    trainer.fit(module, data(), ckpt_path=resume)
    return {name: float(value) for name, value in trainer.callback_metrics.items() if "val" in name}


@cache
def states(checkpoint: Path) -> list[dict[str, Tensor]]:
    """The average and the trained weights, as they are exported."""
    stored = read_checkpoint(checkpoint)
    return [{n: p.detach() for n, p in model_state(stored, ema=ema).items()} for ema in (True, False)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("average")
    saved(folder / "weights")
    found = {
        name: run_distributed(fit, 2, name, str(folder / name), str(folder / "weights"), group=False)
        for name in STRATEGIES
    }
    return folder, found


def test_shards_are_averaged_as_whole_parameters_are(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, found = runs
    whole, sharded = (states(folder / name / "step=3.ckpt") for name in STRATEGIES)
    for ours, expected in zip(sharded, whole, strict=True):
        assert set(ours) == set(expected)
        for name, values in expected.items():
            torch.testing.assert_close(ours[name], values, rtol=0, atol=2e-3)
    average, trained = whole
    assert any((average[name] - trained[name]).abs().max() > 1e-3 for name in average)
    for one, other in zip(found["zellige"], found["zellige_fsdp2"], strict=True):
        assert one == pytest.approx(other, rel=1e-3)
    pictures = []
    for name in STRATEGIES:
        (path,) = (folder / name / "samples").rglob("*.png")
        with Image.open(path) as image:
            pictures.append(np.asarray(image, np.float32))
    assert np.abs(pictures[0] - pictures[1]).max() <= 2.0 and pictures[0].std() > 1.0


def test_a_checkpoint_holds_both_whenever_it_is_saved(runs: tuple[Path, dict[str, Any]]) -> None:
    for name in STRATEGIES:
        folder = runs[0] / name
        assert sorted(path.name for path in (folder / "last").iterdir()) == ["last.ckpt", "step=3.ckpt"]
        expected = states(folder / "step=3.ckpt")
        for path in ("validated.ckpt", "last/last.ckpt"):
            for values, right in zip(states(folder / path), expected, strict=True):
                assert all(torch.equal(values[n], right[n]) for n in right), (name, path)


def test_a_resumed_average_goes_on_exactly(runs: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = runs
    for name in STRATEGIES:
        again, weights = folder / f"{name}-again", str(folder / "weights")
        resume = str(folder / name / "step=2.ckpt")
        run_distributed(fit, 2, name, str(again), weights, resume, group=False)
        pairs = zip(states(again / "step=3.ckpt"), states(folder / name / "step=3.ckpt"), strict=True)
        for resumed, unbroken in pairs:
            assert all(torch.equal(values, unbroken[n]) for n, values in resumed.items()), name
