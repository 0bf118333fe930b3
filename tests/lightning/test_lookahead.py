"""Planning the next batch runs while the current one trains, and what it does not hide is reported."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from torch import Tensor

from tests.distributed import run_distributed
from tests.lightning.toy import (
    Source,
    Toy,
    callback_of,
    flat,
    make_data,
    make_toy,
    make_trainer,
    model_prices,
)
from zellige_lightning import ZelligeStrategy, preparation
from zellige_lightning.monitor import MakespanMonitor
from zellige_lightning.placement import GlobalBatch
from zellige_lightning.report.records import summary

STEP_S = 0.2  # so long that a busy machine does not show


class Observed:
    """A planner that takes `delay_s`, tells when it starts on a batch, and fails from `last_step` on."""

    def __init__(self, planner: Any, delay_s: float, last_step: int) -> None:
        self._planner, self._delay_s, self._last_step = planner, delay_s, last_step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def plan_ladder(self, batch: GlobalBatch, carried: Any = ()) -> Any:
        STARTED.setdefault(batch.step, threading.Event()).set()
        time.sleep(self._delay_s)
        if batch.step >= self._last_step:
            raise RuntimeError("a batch that nobody trains was planned, and failed")
        return self._planner.plan_ladder(batch, carried)


STARTED: dict[int, threading.Event] = {}


class SlowToy(Toy):
    """Each real step sleeps; on rank 0 it also waits until `ahead` further batches are being planned."""

    def __init__(self, sleep_s: float, ahead: int, num_steps: int) -> None:
        super().__init__()
        self.sleep_s, self.ahead, self.num_steps = sleep_s, ahead, num_steps
        self.overlapped: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch.global_batch.sequences[0].key in Source("train").grids:
            time.sleep(self.sleep_s)
            following = batch.global_batch.step + self.ahead
            if self.ahead and self.global_rank == 0 and following < self.num_steps:
                event = STARTED.setdefault(following, threading.Event())
                self.overlapped.append(event.wait(20.0))
        return super().training_step(batch, batch_idx)


def observe(rank: int, delay_s: float, sleep_s: float, ahead: int, epochs: int) -> dict[str, Any]:
    model_prices()
    make_planner = preparation.make_planner
    num_steps = epochs * len(make_data().train_dataloader())
    preparation.make_planner = lambda *args: Observed(make_planner(*args), delay_s, num_steps)
    trainer = make_trainer(ZelligeStrategy(lookahead=max(1, ahead)), max_epochs=epochs)
    toy = make_toy(SlowToy, sleep_s=sleep_s, ahead=ahead, num_steps=num_steps)
    trainer.fit(toy, make_data())
    figures = summary(callback_of(trainer, MakespanMonitor).records)
    return {
        "overlapped": toy.overlapped,
        "num_steps": num_steps,
        "steps": trainer.global_step,
        "exposed_pct": figures["exposed_planning_pct"],
        "solve_ms": figures["solve_ms_mean"],
        "parameters": flat(toy),
    }


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_next_batches_are_planned_during_a_step_across_epochs(ahead: int) -> None:
    """Each step waits for the planning of later ones to begin: without overlap it would wait in vain."""
    first, second = run_distributed(observe, 2, 0.0, 0.0, ahead, 2, group=False)
    assert first["steps"] == first["num_steps"] > 2 * ahead
    assert first["overlapped"] == [True] * (first["num_steps"] - ahead)
    assert first["parameters"] == second["parameters"]


def test_planning_that_fits_into_a_step_is_hidden() -> None:
    for result in run_distributed(observe, 2, 0.5 * STEP_S, STEP_S, 0, 2, group=False):
        assert result["solve_ms"] >= 500 * STEP_S
        assert result["exposed_pct"] < 25.0


def test_planning_that_takes_longer_than_a_step_is_reported() -> None:
    for result in run_distributed(observe, 2, 3 * STEP_S, STEP_S, 0, 1, group=False):
        assert result["solve_ms"] >= 3000 * STEP_S
        assert 25.0 < result["exposed_pct"] <= 100.0
