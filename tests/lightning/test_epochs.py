"""An epoch is the same on any number of ranks and workers: every sample once, in the same global batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.distributed import run_distributed
from tests.lightning.toy import (
    callback_of,
    make_toy,
    make_trainer,
    model_prices,
    tokens_of,
)
from zellige_lightning import ZelligeDataModule, ZelligeStrategy
from zellige_lightning.errors import ConfigError
from zellige_lightning.monitor import MakespanMonitor
from zellige_lightning.sources import Sample

# Most shapes occur once: whatever drops the remainder of a bucket or a batch loses nearly everything.
GRIDS = [(1, 1, n) for n in range(1, 24)] + [(2 + n % 3, 2, n) for n in range(2, 9)] + [(1, 3, 3)] * 5
Seen = list[tuple[int, tuple[str, ...]]]


class Items(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(GRIDS)

    def __getitem__(self, index: int) -> Tensor:
        return tokens_of(f"item-{index}", GRIDS[index])


class UsersData(LightningDataModule):
    """As a user has it: an ordinary DataLoader over an ordinary dataset."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.num_workers = num_workers

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Items(), batch_size=2, shuffle=True, num_workers=self.num_workers, drop_last=True)


def wrapped(num_workers: int = 0, **budget: int) -> ZelligeDataModule:
    return ZelligeDataModule(
        UsersData(num_workers),
        **budget,
        seed=5,
        describe=lambda index: Sample(f"item-{index}", GRIDS[index]),
        tokenize=lambda item: ({"x": item}, {}),
    )


def two_epochs(rank: int) -> dict[int, Seen]:
    model_prices()
    seen = {}
    for num_workers in (0, 2):
        trainer, toy = make_trainer(max_epochs=2), make_toy()
        trainer.fit(toy, wrapped(num_workers, tokens_per_batch=120))
        seen[num_workers] = toy.seen
    return seen


@pytest.fixture(scope="module")
def first() -> Seen:
    """What one process sees."""
    seen = run_distributed(two_epochs, 1, group=False)[0]
    assert seen[0] == seen[2]
    return seen[0]


def test_every_sample_once_an_epoch(first: Seen) -> None:
    for epoch in (0, 1):
        keys = [key for at, batch in first if at == epoch for key in batch]
        assert sorted(keys) == sorted(f"item-{index}" for index in range(len(GRIDS)))
    half = len(first) // 2
    assert [batch for _, batch in first[:half]] != [batch for _, batch in first[half:]]


@pytest.mark.parametrize(
    "world", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_it_is_the_same_on_any_ranks_and_workers(world: int, first: Seen) -> None:
    for seen in run_distributed(two_epochs, world, group=False):
        assert seen[0] == seen[2] == first


CAP_MIB = 5  # holds what one of three ranks has of a batch, not the whole batch


def interrupted(rank: int, folder: str, max_steps: int, budget: dict[str, int]) -> dict[str, Any]:
    """Train two epochs, or go on where a checkpoint is."""
    model_prices()
    checkpoint = Path(folder) / "stopped.ckpt"
    resume = str(checkpoint) if checkpoint.exists() else None
    strategy = ZelligeStrategy(memory_cap_gib=CAP_MIB / 1024)
    trainer, toy = make_trainer(strategy, max_epochs=2, max_steps=max_steps), make_toy()
    data = wrapped(**budget)
    trainer.fit(toy, data, ckpt_path=resume)
    if resume is None:
        trainer.save_checkpoint(checkpoint)
    records = callback_of(trainer, MakespanMonitor).records
    return {
        "keys": [[s.key for s in record.batch.sequences] for record in records],
        "waves": max(record.num_waves for record in records),
        "budget": data.tokens_per_batch,
        "state": torch.load(checkpoint, weights_only=True)["zellige"],
    }


def test_the_budget_belongs_to_the_batch_and_outlives_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run_distributed(interrupted, 3, str(tmp_path / "whole"), -1, {"tokens_per_rank": 50}, group=False)
    first = run_distributed(interrupted, 3, str(tmp_path), 4, {"tokens_per_rank": 50}, group=False)
    rest = run_distributed(interrupted, 1, str(tmp_path), -1, {"tokens_per_rank": 50}, group=False)
    assert first[0]["keys"] + rest[0]["keys"] == whole[0]["keys"]
    assert rest[0]["budget"] == 150 and rest[0]["waves"] > 1 >= first[0]["waves"]
    assert first[0]["state"]["position"] == {"epoch": 0, "delivered": 4}
    assert first[0]["state"]["tokens_per_batch"] == 150
    other = run_distributed(interrupted, 2, str(tmp_path), -1, {"tokens_per_batch": 999}, group=False)
    assert other[0]["keys"] == rest[0]["keys"]


@pytest.mark.parametrize("budget", [{}, {"tokens_per_batch": 10, "tokens_per_rank": 5}])
def test_one_budget_is_given(budget: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="that of each rank"):
        wrapped(**budget)
