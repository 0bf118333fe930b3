"""A disk that is full or closed while a checkpoint is written: one error, and the last good one stays."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.distributed import run_outcomes
from tests.lightning.toy import make_data, make_toy, make_trainer, model_prices
from zellige_lightning.checkpoint_io import DurableCheckpointIO
from zellige_lightning.durable import atomically
from zellige_lightning.errors import DataError


class FullDisk(Callback):
    """From the third step on, no file of this process can grow beyond 2 kB."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))


def fit(rank: int, folder: str) -> None:
    model_prices()
    saves = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
    trainer = make_trainer(
        callbacks=[FullDisk(), saves], enable_checkpointing=True, max_steps=5, max_epochs=-1
    )
    trainer.fit(make_toy(), make_data())


def test_a_full_disk_stops_all_ranks_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    for outcome in run_outcomes(fit, 2, str(tmp_path / "out"), group=False):
        assert outcome.error is not None
        assert outcome.error[0] == "DataError" and "cannot be written in 'out'" in outcome.error[1]
    state = torch.load(tmp_path / "out" / "last.ckpt", weights_only=False)
    assert state["global_step"] == 2
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DataError, match=r"'last.ckpt' cannot be written in 'file'"):
        DurableCheckpointIO().save_checkpoint({}, tmp_path / "file" / "last.ckpt")


def test_other_errors_are_not_taken_for_the_disk(tmp_path: Path) -> None:
    def write(file: Any) -> None:
        file.write(b"half")
        raise RuntimeError("a bug")

    (tmp_path / "x").write_text("whole")
    with pytest.raises(RuntimeError, match="a bug"):
        atomically(tmp_path / "x", write)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "whole")]
