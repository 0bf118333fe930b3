"""The commands of the documents in their order, on real media: encode, train with validation and samples on
two ranks, export, and run the result in diffusers."""

from __future__ import annotations

import csv
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image

from tests.recipes.data.files import REAL_CLIPS, copy_to, make_tiny_vae, real_clip
from tests.recipes.packing import block_diagonal, pack
from zellige_lightning.recipes.wan21.config import CONFIGS
from zellige_lightning.recipes.wan21.export import model_state, read_checkpoint
from zellige_lightning.recipes.wan21.media import find_media
from zellige_lightning.recipes.wan21.model import WanModel
from zellige_lightning.recipes.wan21.patchify import unpatchify

GRIDS = [(1, 4, 4), (2, 3, 5)]
TRAIN = (
    "zellige-train recipe=wan21_1_3b stage=256px objective=diffsynth model.model=tiny model.lr=1e-3"
    " model.warmup_steps=2 data.datamodule.folder=latents data.datamodule.held_out=held-out"
    " data.tokens_per_batch=100 data.tokens_per_rank=null catalog.buckets=null"
    " callbacks=wan21_samples callbacks.samples.vae=vae callbacks.samples.steps=4"
    " callbacks.samples.num_images=1 callbacks.samples.num_videos=1"
    " callbacks.average.decay=0.8 callbacks.throughput.peak_tflops=0.1"
    " trainer.max_steps=12 trainer.val_check_interval=3 trainer.accelerator=cpu trainer.devices=2"
    " trainer.precision=32 profiler.repeats=1 hydra.run.dir=run"
)


def run(command: str, folder: Path) -> str:
    program, *words = shlex.split(command)
    path = Path(sys.executable).parent / program
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [str(path), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_from_media_to_diffusers(tmp_path: Path, tiny_buckets: Path) -> None:
    make_tiny_vae(tmp_path / "vae")
    for name in ("media", "kept"):
        (tmp_path / name).mkdir()
        for clip in REAL_CLIPS[:2]:
            copy_to(real_clip(clip), tmp_path / name)
        for image in ("astronaut.png", "coffee.png", "camera.png") if name == "media" else ("chelsea.png",):
            copy_to(find_media("skimage", f"data/{image}"), tmp_path / name)
    for media, store in (("media", "latents"), ("kept", "held-out")):
        run(
            f"zellige-encode {media} --output {store} --vae vae --buckets {tiny_buckets} --workers 1",
            tmp_path,
        )
    out = run(TRAIN, tmp_path)
    assert json.loads(out.strip().splitlines()[-1])["steps"] == 12

    with (tmp_path / "run" / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    logged = {name for row in rows for name, value in row.items() if value}
    assert {"loss", "val_loss", "val_loss_image", "val_loss_video", "tokens_per_s", "mfu"} <= logged
    assert any(name.startswith("loss/video") for name in logged)
    assert any(name.startswith("val_loss/image") for name in logged)
    losses = [float(row["val_loss"]) for row in rows if row["val_loss"]]
    assert len(losses) == 4 and losses[-1] < losses[0]

    samples = {path.suffix: path for path in (tmp_path / "run").rglob("step-0000012/*")}
    assert set(samples) == {".png", ".mp4", ".json"}
    with Image.open(samples[".png"]) as image:
        assert image.size[0] % 16 == 0

    exported = {"average": "--ema", "trained": ""}
    for name, option in exported.items():
        run(f"zellige-export run/checkpoints/last.ckpt {name} --dtype float32 {option}", tmp_path)
        check(tmp_path / name, tmp_path / "run" / "checkpoints" / "last.ckpt", ema=bool(option))
    weights = [WanTransformer3DModel.from_pretrained(tmp_path / name).state_dict() for name in exported]
    assert any(not torch.equal(values, weights[1][name]) for name, values in weights[0].items())


@torch.no_grad()
def check(exported: Path, checkpoint: Path, *, ema: bool) -> None:
    """diffusers' model answers as ours with the weights of the checkpoint."""
    reference = WanTransformer3DModel.from_pretrained(exported)
    model = WanModel(CONFIGS["tiny"])
    model.load_state_dict(dict(model_state(read_checkpoint(checkpoint), ema=ema)))
    packed = pack(CONFIGS["tiny"], GRIDS, torch.float32)
    _, _, _, times, text, lengths = packed.arguments
    with block_diagonal(model, lengths):
        parts = model(*packed.arguments).split(lengths)
    for i, latents in enumerate(packed.latents):
        expected = reference(latents[None], times[i, None], text[i, None]).sample[0]
        assert expected.abs().max() > 1e-4
        torch.testing.assert_close(unpatchify(parts[i], GRIDS[i]), expected, rtol=0, atol=2e-5)
