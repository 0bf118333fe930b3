"""The wheel: what is in it, and that it works where nothing is known of the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
# Where a folder of the checkout goes in the wheel.
MAPPED = {
    "zellige_lightning": "zellige_lightning",
    "conf": "zellige_lightning/conf",
    "recipes": "zellige_lightning/recipes",
    "hydra_plugins": "hydra_plugins",
}


def sources(suffix: str) -> dict[str, Path]:
    """Path in the wheel -> path in the checkout."""
    return {
        f"{inside}/{path.relative_to(ROOT / folder).as_posix()}": path
        for folder, inside in MAPPED.items()
        for path in (ROOT / folder).rglob(f"*{suffix}")
    }


def clean_env() -> dict[str, str]:
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "HYDRA_FULL_ERROR")
    return {name: value for name, value in os.environ.items() if name not in hidden}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing in the checkout's build folder can leak into it."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in MAPPED:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip_wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip_wheel, "-w", copy / "dist", copy], check=True, cwd=copy, env=clean_env())
    (built,) = (copy / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment that has the wheel. The heavy packages are lent by this one through a path file. That
    does not run this environment's own path files: the editable install of the checkout stays hidden."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-index", wheel], check=True, env=clean_env())
    (site_packages,) = folder.glob("lib/python*/site-packages")
    (site_packages / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


def run(venv: Path, program: str, *args: str, cwd: Path, timeout: int = 240) -> str:
    done = subprocess.run(
        [venv / "bin" / program, *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=clean_env(),
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_and_configuration_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(sources(".py")) - names == set()
    assert set(sources(".yaml")) - names == set()
    assert len(sources(".yaml")) > 10
    assert "zellige_lightning/py.typed" in names
    assert not any(name.startswith(("tests/", "conf/", "recipes/", "benchmarks/")) for name in names)
    assert "hydra_plugins/__init__.py" not in names  # it would hide all other plugins


def test_metadata(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(path).decode())
    needs = {r.name: r for r in map(Requirement, metadata.get_all("Requires-Dist", [])) if r.marker is None}
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    for malicious in ("2.6.2", "2.6.3"):
        assert malicious not in needs["lightning"].specifier
    assert "2.6.6" in needs["lightning"].specifier
    assert "2.9.1" not in needs["torch"].specifier
    assert "1.5.0" not in needs["hydra-core"].specifier
    assert {"dev", "demo", "flash-attn", "fast"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_console_script_works_from_another_folder(clean_venv: Path, tmp_path: Path) -> None:
    where = "import zellige_lightning.recipes.train, zellige_lightning.conf as c; print(c.__file__)"
    assert run(clean_venv, "python", "-c", where, cwd=tmp_path).startswith(str(clean_venv))
    shown = run(
        clean_venv, "zellige-train", "recipe=demo", "planner.epsilon=0.25", "--cfg", "job", cwd=tmp_path
    )
    assert "epsilon: 0.25" in shown
    assert "memory_cap_gib: null" in shown
    assert "tokens_per_batch:" in shown
    assert not list(tmp_path.iterdir())


def test_the_plugin_of_the_wheel_serves_foreign_applications(clean_venv: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(
        "import hydra\n@hydra.main(version_base=None, config_path=None)\ndef main(config): pass\nmain()\n"
    )
    shown = run(clean_venv, "python", "app.py", "+planner=joint", "--cfg", "job", cwd=tmp_path)
    assert "name: joint" in shown
    assert "epsilon: 0.001" in shown


@pytest.mark.slow
def test_the_wheel_trains_from_another_folder(clean_venv: Path, tmp_path: Path) -> None:
    small = ("num_images=12", "num_videos=6", "num_held_out=12")
    overrides = [f"data.datamodule.{setting}" for setting in small]
    overrides += ["model.model=tiny", "trainer.max_steps=1", "profiler.repeats=1"]
    overrides += ["profiler.profile_path=prices.json", "hydra.run.dir=out"]
    shown = run(clean_venv, "zellige-train", "recipe=demo", *overrides, cwd=tmp_path, timeout=400)
    figures = json.loads(shown.splitlines()[-1])
    assert figures["steps"] == figures["global_batches"] == figures["distinct_batches"] == 1
    assert figures["video_loss_after"] != figures["video_loss_before"]
    written = {path.name for path in (tmp_path / "out").rglob("*")}
    assert {"plan.png", "loss.png", "samples.png", "metrics.csv", "train_ddp_process_1.log"} <= written
    assert any(name.endswith(".ckpt") for name in written)
    assert (tmp_path / "prices.json").is_file()
