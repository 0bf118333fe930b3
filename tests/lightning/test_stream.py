"""Streams: every sample once a pass, in one order on any number of ranks, read by one rank and trained where
the plan says; exact, also after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.distributed import run_distributed, run_outcomes
from tests.lightning.toy import (
    batches_of,
    callback_of,
    flat,
    largest_difference,
    make_toy,
    make_trainer,
    model_prices,
    reference_loss,
    reference_training,
    tokens_of,
)
from zellige_lightning import ZelligeDataModule
from zellige_lightning.errors import ConfigError
from zellige_lightning.monitor import MakespanMonitor
from zellige_lightning.sources import Sample

LANES = 5
CATALOG = {"buckets": {"image": [1, 3, 4], "clip": [4, 4, 5]}}
GRIDS = [(1, 3, 4) if number % 4 else (4, 4, 5) for number in range(32)]
BATCHES = 6


class Lanes:
    """Items are numbers; lanes have different lengths, and another order in each pass. Notes who reads."""

    num_lanes = LANES

    def __init__(self, broken: int | None = None) -> None:
        self.read: list[int] = []
        self.broken = broken

    def lane(self, number: int, pass_number: int) -> Iterator[int]:
        numbers = list(range(number, len(GRIDS), LANES))
        for item in numbers if pass_number % 2 == 0 else numbers[::-1]:
            self.read.append(item)
            yield item


class Items(IterableDataset[int]):
    """As most people write a stream."""

    def __iter__(self) -> Iterator[int]:
        yield from range(len(GRIDS))


HELD_OUT = [1, 4, 8, 9, 13]  # items that are validated, among them two clips


class Data(LightningDataModule):
    def __init__(self, stream: Any) -> None:
        super().__init__()
        self.stream = stream

    def train_dataloader(self) -> Any:
        return DataLoader(self.stream, batch_size=1) if isinstance(self.stream, Items) else self.stream

    def val_dataloader(self) -> Any:
        return DataLoader(HELD_OUT)


def describe(item: int) -> Sample:
    return Sample(f"item-{item}", GRIDS[item])


def wrapped(stream: Any, **settings: Any) -> ZelligeDataModule:
    def tokenize(item: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if item == getattr(stream, "broken", None):
            raise OSError("truncated file")
        return {"x": tokens_of(f"item-{item}", GRIDS[item])}, {}

    given = {"catalog": CATALOG, "tokens_per_batch": 150, "batches_per_epoch": BATCHES, "seed": 5}
    return ZelligeDataModule(Data(stream), describe=describe, tokenize=tokenize, **(given | settings))


def train(rank: int, kind: str, settings: dict[str, Any], folder: str, resume: bool) -> dict[str, Any]:
    model_prices()
    trainer, toy = make_trainer(**settings), make_toy()
    stream = Lanes() if kind == "lanes" else Items()
    path = Path(folder) / "stopped.ckpt"
    trainer.fit(toy, wrapped(stream), ckpt_path=str(path) if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    records = callback_of(trainer, MakespanMonitor).records
    return {
        "batches": batches_of(records),
        "splits": sum(record.num_splits for record in records),
        "parameters": flat(toy),
        "read": sorted(set(stream.read)) if kind == "lanes" else [],
    }


@pytest.mark.parametrize("kind", ["lanes", pytest.param("iterable", marks=pytest.mark.slow)])
def test_a_stream_trains_exactly_and_alike_on_any_number_of_ranks(kind: str, tmp_path: Path) -> None:
    runs = {
        world: run_distributed(train, world, kind, {"max_epochs": 3}, str(tmp_path), False, group=False)
        for world in (1, 3)
    }
    batches = runs[1][0]["batches"]
    keys = [key for batch in batches for key, _ in batch]
    assert sorted(keys[: len(GRIDS)]) == sorted(f"item-{number}" for number in range(len(GRIDS)))
    assert len(keys) > len(GRIDS), "the stream is to start over within this test"
    parameters, _ = reference_training(batches)
    for world, results in runs.items():
        for rank, result in enumerate(results):
            assert result["batches"] == batches
            assert largest_difference(result["parameters"], parameters) < 1e-6
            own = {n for n in range(1, len(GRIDS)) if n % LANES % world == rank}  # all look at the first
            assert kind != "lanes" or set(result["read"]) - {0} == own, "read by more than one rank"
        assert world == 1 or results[0]["splits"] > 0


def test_a_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = {"max_epochs": 3, "accumulate_grad_batches": 2}
    whole = run_distributed(train, 2, "lanes", settings, str(tmp_path / ".."), False, group=False)
    first = run_distributed(train, 2, "lanes", settings | {"max_steps": 4}, str(tmp_path), False, group=False)
    for rest in run_distributed(train, 3, "lanes", settings, str(tmp_path), True, group=False):
        assert first[0]["batches"] + rest["batches"] == whole[0]["batches"]
        assert largest_difference(rest["parameters"], whole[0]["parameters"]) < 1e-6


def validated(rank: int) -> dict[str, float]:
    """A stream trains; before and between its steps a map-style dataset is validated by plan."""
    model_prices()
    trainer = make_trainer(limit_val_batches=None, val_check_interval=3, num_sanity_val_steps=1)
    toy = make_toy()
    trainer.fit(toy, wrapped(Lanes(), plan_evaluation=True))
    losses = [float(reference_loss(toy.net, f"item-{n}", GRIDS[n])) for n in HELD_OUT]
    return {"found": float(trainer.callback_metrics["val"]), "expected": sum(losses) / len(losses)}


def test_held_out_samples_are_validated_beside_a_stream() -> None:
    for result in run_distributed(validated, 2, group=False):
        assert result["found"] == pytest.approx(result["expected"], abs=1e-6)


def broken(rank: int) -> None:
    model_prices()
    make_trainer().fit(make_toy(), wrapped(Lanes(broken=6)))


def test_an_item_that_cannot_be_read_is_named_on_all_ranks() -> None:
    for outcome in run_outcomes(broken, 2, group=False):
        assert outcome.error is not None and outcome.error[0] == "DataError"
        assert "'item-6' cannot be read: OSError: truncated file" in outcome.error[1]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"catalog": None}, "what it will bring is not known"),
        ({"batches_per_epoch": None}, "batches_per_epoch=None"),
        ({"video_token_share": 0.5}, "video_token_share=0.5"),
    ],
)
def test_what_a_stream_needs_is_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        wrapped(Items(), **settings).training_loader()
