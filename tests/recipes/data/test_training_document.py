"""What README.md and docs tell people to type for training is run, with tiny models and samples on two
processes where it would take GPUs. Launches on several machines are only composed, in
tests/test_documents.py."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.recipes.data.files import captioned, write_clip, write_image
from tests.recipes.packing import random_model
from zellige_lightning.recipes.wan21 import encode_cli
from zellige_lightning.recipes.wan21.config import CONFIGS
from zellige_lightning.recipes.wan21.weights import save_weights

ROOT = Path(__file__).resolve().parents[3]
SHORT = (
    "trainer.max_steps=2 trainer.accelerator=cpu trainer.devices=2 profiler.repeats=1 profiler.mixed_plans=0"
)
TINY = (
    f"{SHORT} model.model=tiny model.warmup_steps=0 trainer.precision=32 catalog.buckets=null"
    " data.tokens_per_batch=60 data.tokens_per_rank=null"
)
DEMO = f"{SHORT} data.datamodule.num_images=26 data.datamodule.num_videos=12 data.datamodule.num_held_out=4"
# What stands for things that are not there, after what the documents say.
INSTEAD = {
    "model.weights=Wan": "model.weights=stage-256px",
    "callbacks=wan21_samples": "callbacks.samples.vae=demo callbacks.samples.steps=2",
    "val_check_interval": "trainer.val_check_interval=2",
}


def commands(document: Path) -> list[str]:
    """Those that run on one machine without waiting for others."""
    blocks = re.findall(r"```sh\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines() if line]
    programs = ("zellige-", "torchrun --nproc-per-node")
    return [line for line in lines if line.startswith(programs) and "--cfg" not in line]


LINES = [line for name in ("README.md", "docs/TRAINING.md") for line in commands(ROOT / name)] + [
    line
    for name in ("docs/DATA.md", "docs/WEIGHTS.md")  # whose other commands run in test_documents.py
    for line in commands(ROOT / name)
    if line.startswith("zellige-train")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the documents speak of: samples, encoded by the demo's codec, weights and a checkpoint."""
    folder = tmp_path_factory.mktemp("documents")
    media = folder / "media"
    media.mkdir()
    for i in range(6):
        captioned(write_image(media / f"{i}.png", seed=i))
    captioned(write_clip(media / "clip.mp4", 20))
    encode_cli.main([str(media), "--output", str(folder / "latents"), "--buckets", "small", "--quiet"])
    for name in ("latents-256px", "latents-480p", "latents-720p", "wan-latents", "held-out"):
        shutil.copytree(folder / "latents", folder / name)
    model = random_model(CONFIGS["tiny"], torch.float32)
    save_weights(folder / "stage-256px", model.config, model.state_dict())
    state = {f"model.{name}": values for name, values in model.state_dict().items()}
    (folder / "runs" / "256px" / "checkpoints").mkdir(parents=True)
    checkpoint = {"state_dict": state, "current_model_state": state}
    torch.save(checkpoint, folder / "runs" / "256px" / "checkpoints" / "last.ckpt")
    return folder


def words_of(command: str) -> list[str]:
    words = shlex.split(command)
    if "dry_run=true" in words or words[0] not in ("zellige-train", "torchrun"):
        return words
    if words[0] == "torchrun":
        words = [*["python", "-m", "torch.distributed.run", "--nproc-per-node", "2"], *words[3:]]
    more = DEMO if "recipe=demo" in words else "" if "trainer.accelerator=cpu" in words else TINY
    words += more.split()
    return words + [word for said, more in INSTEAD.items() if said in command for word in more.split()]


def run(words: list[str], folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    program = Path(sys.executable).parent / words[0]
    done = subprocess.run(
        [str(program), *words[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_a_command_runs(line: str, folder: Path) -> None:
    out = run(words_of(line), folder)
    if "dry_run=true" in line:
        assert "GPUs, zellige_fsdp2" in out and "peak" in out
    elif line.startswith(("zellige-train", "torchrun")):
        steps = 20 if "trainer.max_steps=20" in line else 2
        assert json.loads(out.strip().splitlines()[-1])["steps"] == steps
