"""What `zellige-train` runs: build what the configuration says, train, and show what happened."""

from __future__ import annotations

import json
import logging
import os
import time
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from omegaconf import DictConfig
from torch.distributed.fsdp import FSDPModule

from zellige_lightning.datamodule import ZelligeDataModule
from zellige_lightning.errors import ConfigError
from zellige_lightning.instantiate import instantiate, instantiate_all
from zellige_lightning.monitor import MakespanMonitor
from zellige_lightning.placement import Topology
from zellige_lightning.recipes.forecast import forecast
from zellige_lightning.recipes.wan21.demo_data import DemoDataModule
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.recipes.wan21.sample import save_samples
from zellige_lightning.report.pictures import loss_curve
from zellige_lightning.report.run import draw_plan, show_plans


def train(config: DictConfig) -> dict[str, Any]:
    """Train by `config`; on rank 0 print the report, whose last line is its figures as JSON, and return them.

    Raises:
        ConfigError: no model or no data was chosen, or a setting is wrong.
    """
    began = time.monotonic()
    # Lightning's own helper uses what torch 2.13 has deprecated; nobody who trains can act on it.
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch\.utilities\._pytree")
    for group in ("model", "data"):
        if config.get(group) is None:
            raise ConfigError(f"no {group} was chosen", fix="add recipe=demo, or see `zellige-train --help`")
    if config.dry_run:
        return forecast(config)
    logging.getLogger("lightning").handlers.clear()  # Hydra's own handler shows these messages already
    seed_everything(config.seed, workers=True, verbose=False)
    callbacks, loggers = (
        instantiate_all(config.callbacks, "callbacks"),
        instantiate_all(config.logger, "logger"),
    )
    trainer: Trainer = instantiate(config.trainer, "trainer", callbacks=callbacks, logger=loggers)
    data: LightningDataModule = instantiate(config.data, "data")
    module: LightningModule = instantiate(config.model, "model")

    losses: dict[str, float] = {}
    if config.evaluate:
        losses |= evaluation(trainer, module, data, "before", config.ckpt_path)
    trainer.fit(module, datamodule=data, ckpt_path=config.ckpt_path)
    if config.evaluate:
        losses |= evaluation(trainer, module, data, "after")
    figures: dict[str, Any] = {"steps": trainer.global_step, **losses}
    if trainer.is_global_zero:
        figures |= report(trainer, module, data) if config.report else {}
        figures["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}), flush=True)
    return figures


def evaluation(
    trainer: Trainer, module: LightningModule, data: LightningDataModule, when: str, ckpt: str | None = None
) -> dict[str, float]:
    """The validation losses of images and videos, `val_loss_image` as `image_loss_before` and so on; of the
    weights in the checkpoint `ckpt`, if there is one."""
    (losses,) = trainer.validate(module, datamodule=data, ckpt_path=ckpt, verbose=False)
    kinds = {kind: losses.get(f"val_loss_{kind}") for kind in ("image", "video")}
    return {f"{kind}_loss_{when}": loss for kind, loss in kinds.items() if loss is not None}


def report(trainer: Trainer, module: LightningModule, data: LightningDataModule) -> dict[str, float]:
    """Tables on the terminal and pictures in the run's folder; returns the figures of all planned batches."""
    folder = Path(trainer.default_root_dir)
    files = [str(c.best_model_path) for c in trainer.checkpoint_callbacks if c.best_model_path]
    files += [str(logger.log_dir) for logger in trainer.loggers]
    figures: dict[str, float] = {}
    records = next((c.records for c in trainer.callbacks if isinstance(c, MakespanMonitor)), [])
    table = getattr(trainer.strategy, "profile", None)
    if records and table is not None and isinstance(data, ZelligeDataModule):
        figures = show_plans(table, data.training_loader().counts(), records, print)
        topology = Topology.uniform(trainer.world_size, trainer.world_size // trainer.num_nodes)
        files.append(str(draw_plan(table, topology, records, folder)))
    files += [str(loss_curve(log, folder / "loss.png")) for log in csv_logs(trainer)]
    inner = getattr(data, "inner", None)
    whole = not isinstance(module, FSDPModule)  # this rank alone can run the model
    if whole and isinstance(module, WanModule) and isinstance(inner, DemoDataModule):
        save_samples(
            folder / "samples.png",
            module.model,
            module.flow,
            inner.codec,
            inner.store("held_out"),
            inner.catalog,
        )
        files.append(str(folder / "samples.png"))
    print("\nwritten:", *(f"  {os.path.relpath(path)}" for path in files), sep="\n")
    return figures


def csv_logs(trainer: Trainer) -> list[Path]:
    """The files of the CSV loggers that have something to show."""
    folders = [Path(logger.log_dir) for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    return [folder / "metrics.csv" for folder in folders if (folder / "metrics.csv").is_file()]
