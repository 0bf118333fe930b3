"""A job that was killed without warning and goes on from its checkpoint ends as if nothing had happened: on
the same number of ranks to the last bit, on another to rounding."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import run_distributed, run_outcomes
from tests.lightning.killed import SAVED, STEPS, checkpoint_of, run

Result = dict[str, Any]
WORLD = 2


STRATEGIES = ["zellige", "zellige_fsdp2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """The run that is never interrupted, under a strategy."""

    @cache
    def of(strategy: str) -> Result:
        folder = tmp_path_factory.mktemp(strategy)
        results = run_distributed(run, WORLD, str(folder), strategy, False, False, group=False)
        assert all(np.array_equal(r["parameters"], results[0]["parameters"]) for r in results)
        steps = results[0]["steps"]
        assert len(steps) == STEPS and len({epoch for epoch, _, _ in steps}) >= 3
        assert len({rate for _, _, rate in steps}) > 10, "the rate is to change, or nothing is tested"
        return results[0]

    return of


def killed_and_resumed(folder: Path, strategy: str, before: int, after: int) -> list[Result]:
    """A job on `before` ranks ends by SIGKILL; another on `after` ranks goes on."""
    outcomes = run_outcomes(run, before, str(folder), strategy, False, True, group=False)
    assert -signal.SIGKILL in [outcome.exit_code for outcome in outcomes]
    assert all(outcome.value is None for outcome in outcomes), "the job was to be killed"
    checkpoint = Path(checkpoint_of(folder))
    assert [path.name for path in folder.glob("*.ckpt")] == [checkpoint.name]
    return run_distributed(run, after, str(folder), strategy, True, False, group=False)


def check_ids_rates_losses(resumed: Result, whole: Result, tolerance: float) -> None:
    assert resumed["steps"] == whole["steps"][SAVED:]
    assert np.allclose(resumed["losses"], whole["losses"][SAVED:], rtol=tolerance, atol=0.0)


@pytest.mark.parametrize("strategy", ["zellige", pytest.param("zellige_fsdp2", marks=pytest.mark.slow)])
def test_the_same_ranks_go_on_to_the_last_bit(
    strategy: str, whole: Callable[[str], Result], tmp_path: Path
) -> None:
    for resumed in killed_and_resumed(tmp_path, strategy, WORLD, WORLD):
        check_ids_rates_losses(resumed, whole(strategy), 0.0)
        assert np.array_equal(resumed["parameters"], whole(strategy)["parameters"])


@pytest.mark.slow
def test_sharding_changes_nothing_but_rounding(whole: Callable[[str], Result]) -> None:
    replicated, sharded = whole("zellige"), whole("zellige_fsdp2")
    assert sharded["steps"] == replicated["steps"]
    assert float(np.abs(sharded["parameters"] - replicated["parameters"]).max()) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_other_ranks_go_on_to_rounding(
    before: int, after: int, strategy: str, whole: Callable[[str], Result], tmp_path: Path
) -> None:
    for resumed in killed_and_resumed(tmp_path, strategy, before, after):
        check_ids_rates_losses(resumed, whole(strategy), 1e-10)
        assert float(np.abs(resumed["parameters"] - whole(strategy)["parameters"]).max()) <= 1e-10
