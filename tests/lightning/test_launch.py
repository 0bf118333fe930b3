"""Lightning's ways to start processes, where the strategy travels to them as a pickle or by fork."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from tests.lightning.toy import largest_difference, reference_training
from zellige_lightning import PlannerConfig, ZelligeStrategy


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_started_processes_train_exactly(method: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.lightning.launched", method, str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["world"] == 2 and len(found["batches"]) == 3
    batches = [[(key, tuple(grid)) for key, grid in batch] for batch in found["batches"]]
    assert largest_difference(found["parameters"], reference_training(batches)[0]) < 1e-6


def test_the_strategy_holds_nothing_that_cannot_travel() -> None:
    strategy = ZelligeStrategy(
        planner={"epsilon": 0.25}, memory_cap_gib=2, lookahead=2, timeout=timedelta(seconds=9)
    )
    for twin in (pickle.loads(pickle.dumps(strategy)), copy.deepcopy(strategy)):
        assert twin.planner_config == PlannerConfig(epsilon=0.25, memory_cap_gib=2)
        assert twin._timeout == timedelta(seconds=9) and twin._lookahead == 2
