"""Validation and test on planned batches: what is split or cut into waves there has the loss of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run_distributed, run_outcomes
from tests.lightning.toy import (
    Source,
    Toy,
    batches_of,
    callback_of,
    flat,
    largest_difference,
    make_data,
    make_toy,
    make_trainer,
    model_prices,
    reference_loss,
    reference_training,
    whole_tensor,
)
from zellige_lightning import ZelligeFSDP2Strategy, ZelligeStrategy
from zellige_lightning.batch import RankBatch
from zellige_lightning.monitor import MakespanMonitor

HELD_OUT = Source("val", 5, 2)


class Watched(Toy):
    """Remembers the degrees of the sequences that it was validated on, by wave."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__(lr)
        self.waves: list[dict[str, int]] = []

    def validation_step(self, batch: RankBatch, batch_idx: int) -> None:
        options = zip(batch.global_batch.sequences, batch.plan.options, strict=True)
        self.waves.append({s.key: option.config.degree for s, option in options})
        super().validation_step(batch, batch_idx)


def evaluate(rank: int, cap_mib: int | None, strategy: str = "zellige") -> dict[str, Any]:
    """Validates before and during a fit, while the next training batch is prepared, and tests after it."""
    model_prices()
    cap = None if cap_mib is None else cap_mib / 1024
    kind = {"zellige": ZelligeStrategy, "zellige_fsdp2": ZelligeFSDP2Strategy}[strategy]
    trainer = make_trainer(
        kind(planner={"memory_cap_gib": cap}), limit_val_batches=None, val_check_interval=2
    )
    toy, data = make_toy(Watched), make_data(plan_evaluation=True)
    assert isinstance(toy, Watched)
    (before,) = trainer.validate(toy, data, verbose=False)
    waves = len(toy.waves)
    trainer.fit(toy, data)
    whole = Toy()
    with torch.no_grad():
        for own, trained in zip(whole.parameters(), toy.parameters(), strict=True):
            own.copy_(whole_tensor(trained))
        expected = {k: float(reference_loss(whole.net, k, g)) for k, g in HELD_OUT.grids.items()}
    batches = batches_of(callback_of(trainer, MakespanMonitor).records)
    drift = largest_difference(flat(whole), reference_training(batches)[0])
    fitted = float(trainer.callback_metrics["val"])
    (tested,) = trainer.test(toy, data, verbose=False)
    seen = {key: degree for wave in toy.waves for key, degree in wave.items()}
    return {
        "mean": sum(expected.values()) / len(expected),
        **{"before": before["val"], "fitted": fitted, "test": tested["test"]},
        **{"drift": drift, "seen": seen, "waves": waves, "rounds": len(toy.waves) / waves},
    }


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    (found,) = run_distributed(evaluate, 1, None, group=False)
    return found


@pytest.mark.parametrize(("cap_mib", "strategy"), [(None, "zellige"), (1, "zellige"), (1, "zellige_fsdp2")])
def test_losses_are_those_of_whole_sequences(
    cap_mib: int | None, strategy: str, alone: dict[str, Any]
) -> None:
    for found in run_distributed(evaluate, 2, cap_mib, strategy, group=False):
        assert found["drift"] < 1e-6, "training is not what it is without validation"
        assert sorted(found["seen"]) == sorted(HELD_OUT.grids)
        assert max(found["seen"].values()) == 2, "nothing was split"
        assert found["fitted"] == found["test"] == pytest.approx(found["mean"], abs=1e-6)
        assert found["before"] == pytest.approx(alone["before"], abs=1e-6)
        assert found["rounds"] >= 3  # before, and at least twice during the fit


def validate_plainly(rank: int) -> None:
    make_trainer("ddp", limit_val_batches=None).validate(
        make_toy(), make_data(plan_evaluation=True), verbose=False
    )


def test_other_strategies_cannot_plan_an_evaluation() -> None:
    for outcome in run_outcomes(validate_plainly, 2, group=False):
        assert outcome.error is not None
        assert outcome.error[0] == "ConfigError" and "DDPStrategy" in outcome.error[1]
