"""The demo on two ranks against one process that knows nothing of placement: same batches, same losses."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig, open_dict
from torch.nn.utils import clip_grad_norm_

from tests.distributed import run_distributed
from zellige_lightning import ZelligeStrategy
from zellige_lightning.batch import local_batch
from zellige_lightning.datamodule import ZelligeDataModule
from zellige_lightning.instantiate import instantiate
from zellige_lightning.placement import GlobalBatch
from zellige_lightning.recipes.wan21.module import WanModule


def demo(cache: str, *overrides: str) -> DictConfig:
    with initialize_config_module("zellige_lightning.conf", version_base="1.3"):
        config = compose("train", overrides=["recipe=demo", *overrides])
    with open_dict(config):
        config.data.datamodule.cache_dir = cache
    return config


def parts(config: DictConfig) -> tuple[WanModule, ZelligeDataModule]:
    seed_everything(config.seed, workers=True, verbose=False)
    data: Any = instantiate(config.data, "data")
    module: Any = instantiate(config.model, "model")
    return module, data


def fit_on_ranks(rank: int, cache: str, folder: str, steps: int) -> dict[str, Any]:
    config = demo(cache)
    module, data = parts(config)
    trainer = Trainer(
        strategy=ZelligeStrategy(profiler={"repeats": 1, "mixed_plans": 0}),
        accelerator="cpu", devices=2, max_steps=steps, log_every_n_steps=1,
        gradient_clip_val=config.trainer.gradient_clip_val, logger=CSVLogger(folder, "", ""),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(module, data)
    (monitor,) = (c for c in trainer.callbacks if hasattr(c, "records"))
    splits = sum(record.num_splits for record in monitor.records)
    return {"splits": splits, "parameters": {n: p.detach().numpy() for n, p in module.named_parameters()}}


def train_plainly(cache: str, steps: int) -> tuple[list[float], WanModule]:
    """Each sequence alone through plain attention; the loss is the mean over the batch."""
    config = demo(cache)
    module, data = parts(config)
    data.prepare_data()
    data.setup("fit")
    loader = data.training_loader()
    setup: Any = module.configure_optimizers()
    optimizer, scheduler = setup["optimizer"], setup["lr_scheduler"]["scheduler"]
    losses: list[float] = []
    for step in range(steps):
        epoch, index = divmod(step, len(loader))
        batch = loader.epoch_batches(epoch, window=1, limit=len(loader))[index]
        optimizer.zero_grad()
        loss = torch.stack([_loss_alone(module, loader.source, batch, s) for s in batch.sequences]).mean()
        loss.backward()
        clip_grad_norm_(module.parameters(), config.trainer.gradient_clip_val)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, module


def _loss_alone(module: WanModule, source: Any, batch: GlobalBatch, sequence: Any) -> torch.Tensor:
    alone = local_batch(GlobalBatch.of(batch.step, batch.epoch, [(sequence.key, sequence.bucket)]), source)
    return module.per_token_loss(alone, module.flow, batch.epoch).mean()


@pytest.mark.parametrize("steps", [5, pytest.param(120, marks=pytest.mark.slow)])
def test_the_demo_trains_like_a_single_plain_process(steps: int, tmp_path: Path) -> None:
    cache, folder = str(tmp_path / "latents"), str(tmp_path / "run")
    torch.set_num_threads(1)
    losses, module = train_plainly(cache, steps)
    ranks = run_distributed(fit_on_ranks, 2, cache, folder, steps, group=False, timeout_s=900)
    with open(Path(folder) / "metrics.csv") as file:
        logged = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
    assert len(logged) == steps and ranks[0]["splits"] > 0
    worst = max(abs(a - b) / abs(b) for a, b in zip(logged, losses, strict=True))
    print(f"\n{steps} steps, {ranks[0]['splits']} splits: losses differ by at most {worst:.1e} (relative)")
    assert worst <= 1e-3
    for name, parameter in module.named_parameters():
        mine, other = ranks[0]["parameters"][name], ranks[1]["parameters"][name]
        assert (mine == other).all(), f"ranks disagree on {name}"
        if steps <= 5:
            assert torch.allclose(torch.from_numpy(mine), parameter.detach(), rtol=1e-3, atol=1e-4)
