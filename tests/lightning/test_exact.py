"""Training under the strategy is training in one process: same parameters, same losses, on every number of
ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler

from tests.distributed import run_distributed
from tests.lightning.toy import (
    batches_of,
    callback_of,
    digest,
    flat,
    largest_difference,
    make_data,
    make_toy,
    make_trainer,
    model_prices,
    reference_training,
)
from zellige_lightning.monitor import MakespanMonitor
from zellige_lightning.strategy import ZelligeStrategy


class Losses(Callback):
    """What a user reads as the loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        self.values.append(float(trainer.callback_metrics["loss"]))


def train(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    model_prices()
    torch.manual_seed(100 + rank)  # whatever a rank draws by itself must not matter
    losses = Losses()
    schedule, planner = settings.pop("schedule", None), settings.pop("planner", None)
    data = make_data(**settings.pop("data", {}))
    callbacks = [losses, *([GradientAccumulationScheduler(schedule)] if schedule else [])]
    strategy = settings.pop("strategy", None) or ZelligeStrategy(planner=planner)
    trainer, toy = make_trainer(strategy, callbacks=callbacks, **settings), make_toy()
    trainer.fit(toy, data)
    records = callback_of(trainer, MakespanMonitor).records
    return {
        "digest": digest(toy),
        "parameters": flat(toy),
        "losses": losses.values,
        "batches": batches_of(records),
        "epochs": [record.batch.epoch for record in records],
        "splits": sum(record.num_splits for record in records),
        "steps": trainer.global_step,
    }


def test_three_steps_on_four_ranks_equal_one_process() -> None:
    results = run_distributed(train, 4, {"limit_train_batches": 3}, group=False)
    assert len({result["digest"] for result in results}) == 1, "the ranks have drifted apart"
    assert len({tuple(result["losses"]) for result in results}) == 1, "ranks log different losses"
    result = results[0]
    parameters, losses = reference_training(result["batches"])
    assert result["steps"] == 3 and result["splits"] > 0
    assert largest_difference(result["parameters"], parameters) < 1e-6
    assert result["losses"] == pytest.approx(losses, abs=1e-5)  # the global loss, not that of one rank


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"accumulate_grad_batches": 2, "limit_train_batches": 3}, {"window": 2}),
        ({"gradient_clip_val": 0.05}, {"clip_norm": 0.05}),
        ({"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}, {"clip_value": 0.002}),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "limit_train_batches": 3}, {"window": 2,
        "clip_norm": 0.05}),
    ],
    ids=["partial last window", "clip by norm", "clip by value", "window and clip"],
)  # fmt: skip
def test_accumulation_and_clipping_are_exact(settings: dict[str, Any], reference: dict[str, Any]) -> None:
    first, second = run_distributed(train, 2, settings, group=False)
    assert first["digest"] == second["digest"] and first["splits"] > 0
    parameters, _ = reference_training(first["batches"], **reference)
    free, _ = reference_training(first["batches"])
    assert largest_difference(first["parameters"], parameters) < 1e-6
    assert largest_difference(free, parameters) > 1e-4, (
        "the setting makes no difference here, so nothing was tested"
    )


@pytest.mark.parametrize(
    ("planner", "data"),
    [
        ({"name": "knapformer", "family": "contiguous"}, {}),
        (
            {"name": "adaptive_load"},
            {"adaptive_load": {"exponent": 1.5, "ranks": 2}, "video_token_share": None},
        ),
    ],
    ids=["knapformer", "adaptive_load with its own batches"],
)
def test_rivals_train_as_one_process_does(planner: dict[str, Any], data: dict[str, Any]) -> None:
    settings = {"planner": planner, "data": data, "limit_train_batches": 2}
    first, second = run_distributed(train, 2, settings, group=False)
    assert first["digest"] == second["digest"]
    assert (first["splits"] > 0) == (planner["name"] == "knapformer")
    parameters, losses = reference_training(first["batches"])
    assert largest_difference(first["parameters"], parameters) < 1e-6
    assert first["losses"] == pytest.approx(losses, abs=1e-5)


def test_a_schedule_of_accumulation_is_exact() -> None:
    """The first batch of an epoch is planned before the trainer has switched to that epoch's accumulation."""
    settings = {"schedule": {0: 1, 1: 2}, "limit_train_batches": 2, "max_epochs": 2}
    first, _ = run_distributed(train, 2, settings, group=False)
    merged = [*first["batches"][:2], first["batches"][2] + first["batches"][3]]
    parameters, _ = reference_training(merged)
    assert first["steps"] == 3 and first["epochs"] == [0, 0, 1, 1]
    assert largest_difference(first["parameters"], parameters) < 1e-6


def test_one_device_equals_plain_training() -> None:
    (result,) = run_distributed(train, 1, {"max_epochs": 2}, group=False)
    parameters, losses = reference_training(result["batches"])
    assert largest_difference(result["parameters"], parameters) < 1e-6
    assert result["losses"] == pytest.approx(losses, abs=1e-5)


def in_half(rank: int, precision: str) -> dict[str, Any]:
    model_prices()
    trainer, toy = make_trainer(precision=precision, limit_val_batches=1.0), make_toy()
    trainer.fit(toy, make_data())
    dtypes = sorted({str(p.dtype) for p in toy.parameters()})
    records = callback_of(trainer, MakespanMonitor).records
    return {
        "parameters": flat(toy),
        "dtypes": dtypes,
        "batches": batches_of(records),
        "val": float(trainer.callback_metrics["val"]),
        "splits": sum(record.num_splits for record in records),
    }


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", "float32"), ("bf16-true", "bfloat16")])
def test_half_precision_stays_close(precision: str, dtype: str) -> None:
    first, second = run_distributed(in_half, 2, precision, group=False)
    parameters, losses = reference_training(first["batches"])
    assert first["dtypes"] == [f"torch.{dtype}"] and first["splits"] > 0
    assert first["parameters"] == second["parameters"] and first["val"] == second["val"]
    assert largest_difference(first["parameters"], parameters) < 0.02
    assert 0 < first["val"] < 1.5 * losses[-1], "evaluation lost its loss weights in half precision"
