"""Encoded folders as a data module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zellige_lightning.datamodule import ZelligeDataModule
from zellige_lightning.errors import DataError
from zellige_lightning.recipes.latents import LatentDataModule
from zellige_lightning.recipes.wan21.encode import Encoded, build_store
from zellige_lightning.sources import Sample

SAMPLES = [Sample("image/0", (1, 2, 3)), Sample("image/1", (1, 2, 2)), Sample("video/0", (3, 2, 2))]


def encode(sample: Sample) -> Encoded:
    frames, rows, columns = sample.grid
    length = frames * rows * columns
    return Encoded(torch.full((length, 64), float(len(sample.key))), torch.ones(4, 8), sample.key)


def folder(path: Path, samples: list[Sample]) -> str:
    build_store(path, {"codec": "toy"}, samples, encode)
    return str(path)


def test_folders_become_global_batches(tmp_path: Path) -> None:
    inner = LatentDataModule(folder(tmp_path / "train", SAMPLES), folder(tmp_path / "held", SAMPLES[:1]))
    data = ZelligeDataModule(inner, tokens_per_batch=100)
    data.setup("fit")
    (batch,) = list(data.train_dataloader())
    assert {sequence.key for sequence in batch.sequences} == {sample.key for sample in SAMPLES}
    assert batch.num_tokens == 6 + 4 + 12
    (held_out,) = list(data.val_dataloader())
    assert [sequence.key for sequence in held_out.batch.sequences] == ["image/0"]
    latents = inner.val_dataloader().dataset.read_tokens(held_out.batch.sequences[0], range(2, 6))["latents"]
    assert latents.tolist() == [[7.0] * 64] * 4


def test_without_held_out_samples_there_is_no_validation(tmp_path: Path) -> None:
    data = ZelligeDataModule(LatentDataModule(folder(tmp_path, SAMPLES)), tokens_per_batch=100)
    data.setup("fit")
    assert data.val_dataloader() == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'nowhere' has no index.json"):
        LatentDataModule(str(tmp_path / "nowhere")).setup()
