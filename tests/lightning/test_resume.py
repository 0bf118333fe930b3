"""A run that stops anywhere goes on exactly there: same samples, same parameters, on any number of ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from tests.distributed import run_distributed
from tests.lightning.toy import (
    Source,
    Toy,
    ToyData,
    digest,
    flat,
    largest_difference,
    make_data,
    make_toy,
    make_trainer,
    model_prices,
)

EPOCHS = 2
Seen = list[tuple[int, tuple[str, ...]]]


def full_run(rank: int, folder: str) -> dict[str, Any]:
    model_prices()
    every = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(callbacks=[every], enable_checkpointing=True, max_epochs=EPOCHS)
    toy = make_toy()
    trainer.fit(toy, make_data())
    return {"seen": toy.seen, "digest": digest(toy), "parameters": flat(toy)}


def resumed_run(rank: int, checkpoint: str, catalog: dict[str, Any] | None, window: int) -> dict[str, Any]:
    model_prices()
    trainer, toy = make_trainer(max_epochs=EPOCHS, accumulate_grad_batches=window), make_toy()
    torch.manual_seed(rank + 17)
    trainer.fit(toy, make_data(catalog=catalog), ckpt_path=checkpoint)
    return {
        "seen": toy.seen,
        "digest": digest(toy),
        "parameters": flat(toy),
        "steps": trainer.global_step,
    }


def resume(world: int, checkpoint: Path, catalog: Any = None, window: int = 1) -> list[dict[str, Any]]:
    return run_distributed(resumed_run, world, str(checkpoint), catalog, window, group=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("full")
    first, second = run_distributed(full_run, 2, str(folder), group=False)
    assert first == second
    return folder, first


def step_file(folder: Path, step: int) -> Path:
    return folder / f"step={step}.ckpt"


def steps_per_epoch(result: dict[str, Any]) -> int:
    return len(result["seen"]) // EPOCHS


def test_resume_in_mid_epoch_repeats_and_skips_nothing(run: tuple[Path, dict[str, Any]]) -> None:
    folder, full = run
    step = steps_per_epoch(full) + 2  # inside the second epoch
    for resumed in resume(2, step_file(folder, step)):
        assert resumed["seen"] == full["seen"][step:]
        assert resumed["digest"] == full["digest"]


def test_resume_at_the_end_of_an_epoch(run: tuple[Path, dict[str, Any]]) -> None:
    folder, full = run
    step = steps_per_epoch(full)
    for resumed in resume(2, step_file(folder, step)):
        assert resumed["seen"] == full["seen"][step:]
        assert resumed["digest"] == full["digest"]


class Scheduled(Toy):
    """Asks for the number of steps before anything runs, as cosine schedules do."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def scheduled_run(rank: int, folder: str) -> dict[str, Any]:
    model_prices()
    every = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(callbacks=[every], enable_checkpointing=True, max_epochs=EPOCHS)
    toy = make_toy(Scheduled)
    trainer.fit(toy, make_data())
    trainer, again = make_trainer(max_epochs=EPOCHS), make_toy(Scheduled)
    trainer.fit(again, make_data(), ckpt_path=str(Path(folder) / "step=2.ckpt"))
    return {
        "resumed": again.seen == toy.seen[2:] and digest(again) == digest(toy),
        "last_lr": trainer.optimizers[0].param_groups[0]["lr"],
    }


def test_estimated_steps_are_right_and_do_not_lose_the_position(tmp_path: Path) -> None:
    for result in run_distributed(scheduled_run, 2, str(tmp_path), group=False):
        assert result["resumed"] and result["last_lr"] == pytest.approx(0.0, abs=1e-9)


def test_resume_on_one_rank_with_another_catalog(run: tuple[Path, dict[str, Any]]) -> None:
    folder, full = run
    catalog = {"buckets": {"square": [1, 3, 3], "clip": [4, 4, 5], "never seen": [2, 2, 2]}}
    (resumed,) = resume(1, step_file(folder, 2), catalog)
    assert resumed["seen"] == full["seen"][2:]
    assert largest_difference(resumed["parameters"], full["parameters"]) < 1e-6


def test_the_state_of_the_data_is_global_and_no_profile_is_saved(
    run: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = run
    checkpoint = torch.load(step_file(folder, 2), weights_only=False)
    assert checkpoint["zellige"]["position"] == {"epoch": 0, "delivered": 2}
    assert checkpoint["zellige"].keys() <= {"position", "prices", "tokens_per_batch"}
    assert isinstance(checkpoint["zellige"]["prices"]["profile"], str)  # the version of prices, not prices
    assert checkpoint["zellige"]["tokens_per_batch"] == 150
    assert checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] == []


class PlainData(ToyData):
    def train_dataloader(self) -> Any:
        source = Source("train")
        rows = [
            source.read_tokens(_Whole(s), range(s.grid[0] * s.grid[1] * s.grid[2])) for s in source.samples
        ]
        return DataLoader([row["x"] for row in rows], batch_size=1)


class _Whole:
    """What a source needs to know of a sequence."""

    def __init__(self, sample: Any) -> None:
        self.key, self.bucket = sample.key, sample


class PlainToy(Toy):
    """The same parameters without planned batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch[0]
        return (self.net(x, torch.zeros(len(x), 3)) - x).square().mean()


def plainly(rank: int, checkpoint: str) -> dict[str, Any]:
    results = {}
    for name, strategy in (("ddp", "ddp"), ("auto", "auto")):
        trainer, toy = make_trainer(strategy=strategy, max_epochs=EPOCHS), make_toy(PlainToy)
        trainer.fit(toy, PlainData(), ckpt_path=checkpoint)
        results[name] = trainer.global_step
    return results


def test_other_strategies_load_the_checkpoints(run: tuple[Path, dict[str, Any]]) -> None:
    (steps,) = run_distributed(plainly, 1, str(step_file(run[0], 2)), group=False)
    assert steps["ddp"] > 2 and steps["auto"] > 2, steps


# ---- stopping
# -------------------------------------------------------------------------------------------------


class Stopped(Toy):
    """Gets SIGTERM on one rank during a step, or fails on one."""

    def __init__(self, stopped_rank: int, at: int, how: str) -> None:
        super().__init__()
        self.stopped_rank, self.at, self.how = stopped_rank, at, how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        real = batch.global_batch.sequences[0].key in Source("train").grids  # not a trial on a copy
        if real and len(self.seen) == self.at and self.global_rank == self.stopped_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        if real and len(self.seen) == self.at and self.how == "fails everywhere":
            raise ArithmeticError("the loss is not finite")
        return loss


class Hooks(Callback):
    """What callbacks are told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.told.append(type(exception).__name__)


class HookedData(ToyData):
    """What data modules are told."""

    told = ""

    def on_exception(self, exception: BaseException) -> None:
        self.told = type(exception).__name__


def stopped_run(rank: int, folder: str, stopped_rank: int, at: int, window: int, how: str) -> dict[str, Any]:
    model_prices()
    kept, hooks, data = OnExceptionCheckpoint(folder, filename="stopped"), Hooks(), HookedData()
    trainer = make_trainer(
        callbacks=[kept, hooks], enable_checkpointing=True, max_epochs=EPOCHS, accumulate_grad_batches=window
    )
    toy = make_toy(Stopped, stopped_rank=stopped_rank, at=at, how=how)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        trainer.fit(toy, make_data(data))
    except (SIGTERMException, Exception) as error:
        ended, text = type(error).__name__, str(error)
    return {
        "ended": ended,
        "told": [*hooks.told, data.told],
        "text": text,
        "seen": toy.seen,
        "steps": trainer.global_step,
        "parameters": flat(toy),
        "handler": signal.getsignal(signal.SIGTERM) == handler,
        "received": trainer.received_sigterm,
    }


def check_rest(folder: Path, before: Seen, window: int = 1) -> list[dict[str, Any]]:
    """Resume; both parts together see every sample once an epoch."""
    (checkpoint,) = Path(folder).glob("*.ckpt")
    results = resume(2, checkpoint, window=window)
    for epoch in range(EPOCHS):
        keys = [key for e, batch in before + results[0]["seen"] if e == epoch for key in batch]
        assert sorted(keys) == sorted(Source("train").grids)
    return results


@pytest.mark.parametrize("stopped_rank", [0, 1])
def test_sigterm_to_any_rank_stops_all_at_the_same_step(
    stopped_rank: int, tmp_path: Path, run: tuple[Path, dict[str, Any]]
) -> None:
    began = time.monotonic()
    results = run_distributed(stopped_run, 2, str(tmp_path), stopped_rank, 2, 1, "sigterm", group=False)
    assert time.monotonic() - began < 30.0
    for result in results:
        assert result["ended"] == "SIGTERMException" and result["received"] and result["handler"]
        assert result["told"] == ["SIGTERMException"] * 2
        assert result["steps"] == results[0]["steps"] <= 4, "not within a step of the signal"
        assert result["parameters"] == results[0]["parameters"]
    rest = check_rest(tmp_path, results[0]["seen"])
    assert rest[0]["digest"] == run[1]["digest"]


@pytest.mark.parametrize("at", [1, 2])
def test_sigterm_waits_for_the_end_of_an_accumulation_window(at: int, tmp_path: Path) -> None:
    results = run_distributed(stopped_run, 2, str(tmp_path), 1, at, 2, "sigterm", group=False)
    for result in results:
        assert result["ended"] == "SIGTERMException"
        assert len(result["seen"]) % 2 == 0 and result["steps"] == len(result["seen"]) // 2
    check_rest(tmp_path, results[0]["seen"], window=2)


def test_a_checkpoint_of_a_failed_step_repeats_that_step(
    tmp_path: Path, run: tuple[Path, dict[str, Any]]
) -> None:
    results = run_distributed(stopped_run, 2, str(tmp_path), -1, 3, 1, "fails everywhere", group=False)
    for result in results:
        assert result["ended"] == "RankFailure"
        assert "ArithmeticError: the loss is not finite" in result["text"]
        assert result["told"] == ["RankFailure"] * 2
    assert len(results[0]["seen"]) == 3 and results[0]["steps"] == 2
    rest = check_rest(tmp_path, results[0]["seen"][:2])
    assert rest[0]["digest"] == run[1]["digest"]


def saved_by_hand(rank: int, folder: str, steps: int) -> dict[str, Any]:
    model_prices()
    trainer, toy = make_trainer(max_epochs=EPOCHS, max_steps=steps), make_toy()
    trainer.fit(toy, make_data())
    trainer.save_checkpoint(f"{folder}/by-hand.ckpt")
    return {"seen": toy.seen}


@pytest.mark.parametrize("further", [0, 1, 2])
def test_a_checkpoint_that_is_saved_after_a_fit_goes_on_there(
    further: int, tmp_path: Path, run: tuple[Path, dict[str, Any]]
) -> None:
    """Also where `max_steps` has ended an epoch early, which the trainer then takes for a whole one."""
    full = run[1]
    steps = steps_per_epoch(full) + further
    run_distributed(saved_by_hand, 2, str(tmp_path), steps, group=False)
    for resumed in resume(2, tmp_path / "by-hand.ckpt"):
        assert resumed["seen"] == full["seen"][steps:]
        assert resumed["digest"] == full["digest"]
