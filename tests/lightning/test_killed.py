"""Killed without warning at any step, a job resumed from its checkpoint ends as if nothing had happened: on the
same number of ranks to the last bit, on another to rounding."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed import run_distributed, run_outcomes
from tests.lightning.killed import SAVED, STEPS, checkpoint_of, run

Result = dict[str, Any]
WORLD = 2


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    results = run_distributed(run, WORLD, str(folder), "zellige", False, False, group=False)
    assert all(np.array_equal(r["parameters"], results[0]["parameters"]) for r in results)
    assert len(results[0]["steps"]) == STEPS
    assert len({epoch for epoch, _, _ in results[0]["steps"]}) >= 3
    assert len({rate for _, _, rate in results[0]["steps"]}) > 10, "the rate is to change, or nothing is tested"
    return results[0]


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


def test_the_same_ranks_go_on_to_the_last_bit(whole: Result, tmp_path: Path) -> None:
    for resumed in killed_and_resumed(tmp_path, "zellige", WORLD, WORLD):
        check_ids_rates_losses(resumed, whole, 0.0)
        assert np.array_equal(resumed["parameters"], whole["parameters"])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_other_ranks_go_on_to_rounding(before: int, after: int, whole: Result, tmp_path: Path) -> None:
    for resumed in killed_and_resumed(tmp_path, "zellige", before, after):
        check_ids_rates_losses(resumed, whole, 1e-10)
        assert float(np.abs(resumed["parameters"] - whole["parameters"]).max()) <= 1e-10
