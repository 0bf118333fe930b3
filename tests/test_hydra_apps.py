"""The strategy in anybody's Hydra application, run from another folder, and `zellige-train` itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Knows nothing of the package: no import, no configuration of ours.
FOREIGN = """
import json, pathlib
import hydra
import lightning.pytorch as pl
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.demos.boring_classes import BoringModel

@hydra.main(version_base=None, config_path=None)
def main(config):
    trainer = pl.Trainer(
        strategy=config.trainer.strategy, devices=config.trainer.devices, accelerator="cpu", max_steps=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(BoringModel())
    strategy = trainer.strategy
    seen = {
        "type": type(strategy).__name__, "world": trainer.world_size, "steps": trainer.global_step,
        "epsilon": strategy.planner_config.epsilon, "cap": strategy.planner_config.memory_cap_gib,
        "family": strategy.planner_config.family, "repeats": strategy.profiler_config.repeats,
    }
    folder = pathlib.Path(HydraConfig.get().runtime.output_dir)
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))

main()
"""
STRATEGY = ("+trainer.strategy=zellige", "+planner=paper", "+profiler=default", "planner.memory_cap_gib=2")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "elsewhere" / "app.py"
    path.parent.mkdir()
    path.write_text(FOREIGN)
    return path


def run(program: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    hidden = ("PYTHONPATH", "HYDRA_FULL_ERROR")
    env = {name: value for name, value in os.environ.items() if name not in hidden} | {"OMP_NUM_THREADS": "1"}
    command = (
        [sys.executable, program] if program.endswith(".py") else [f"{Path(sys.executable).parent}/{program}"]
    )
    return subprocess.run([*command, *args], capture_output=True, text=True, cwd=cwd, env=env, timeout=300)


def reports(folder: Path) -> dict[str, dict[str, object]]:
    """What each rank of each job saw, by path below `folder`."""
    return {p.relative_to(folder).as_posix(): json.loads(p.read_text()) for p in folder.rglob("rank*.json")}


@pytest.mark.parametrize("devices", [1, 2])
def test_the_bare_string_reads_the_application(app: Path, tmp_path: Path, devices: int) -> None:
    overrides = (*STRATEGY, f"+trainer.devices={devices}", "planner.epsilon=0.01", "hydra.run.dir=out")
    done = run(str(app), *overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = reports(tmp_path / "out")
    assert set(seen) == {f"rank{rank}.json" for rank in range(devices)}
    expected = {"type": "ZelligeStrategy", "world": devices, "steps": 2, "epsilon": 0.01, "cap": 2}
    for report in seen.values():
        assert report == expected | {"family": "aligned", "repeats": 5}
    assert {p.name for p in tmp_path.iterdir()} == {"elsewhere", "out"}


def test_a_sweep_makes_one_directory_per_job(app: Path, tmp_path: Path) -> None:
    sweep = ("planner.epsilon=1e-3,1e-2", "hydra.sweep.dir=sweep", "+note='a b, c=d'")
    done = run(str(app), "-m", *STRATEGY, "+trainer.devices=2", *sweep, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = reports(tmp_path)
    assert {name: report["epsilon"] for name, report in seen.items()} == {
        "sweep/0/rank0.json": 0.001,
        "sweep/0/rank1.json": 0.001,
        "sweep/1/rank0.json": 0.01,
        "sweep/1/rank1.json": 0.01,
    }
    assert {p.name for p in (tmp_path / "sweep").iterdir()} == {"0", "1", "multirun.yaml"}
    assert {p.name for p in tmp_path.iterdir()} == {"elsewhere", "sweep"}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("recipe=demo", "planner.epsilom=1"), "did you mean 'epsilon'? legal keys of planner: "),
        (("recipe=demo", "model._target_=os.system"), "model._target_='os.system' is not allowed"),
    ],
)
def test_mistakes_end_in_one_message(tmp_path: Path, overrides: tuple[str, ...], says: str) -> None:
    done = run("zellige-train", *overrides, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("ConfigError") == 1
    assert says in done.stderr
    assert "Traceback" not in done.stderr
