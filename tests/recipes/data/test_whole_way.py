"""The whole way: real media, encoded, trained on by two ranks, exported, and run by diffusers."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging

from tests.distributed import run_distributed
from tests.lightning.toy import make_trainer, model_prices
from tests.recipes.data.files import REAL_CLIPS, copy_to, real_clip
from tests.recipes.packing import block_diagonal, pack
from zellige_lightning.datamodule import ZelligeDataModule
from zellige_lightning.recipes.latents import LatentDataModule
from zellige_lightning.recipes.wan21.config import CONFIGS
from zellige_lightning.recipes.wan21.encode_cli import main as encode
from zellige_lightning.recipes.wan21.export import main as export
from zellige_lightning.recipes.wan21.media import find_media
from zellige_lightning.recipes.wan21.model import WanModel
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.recipes.wan21.patchify import unpatchify
from zellige_lightning.recipes.wan21.weights import load_weights

GRIDS = [(1, 4, 4), (2, 3, 5)]


class Saves(Callback):
    """Writes a checkpoint while the running average is there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def train(rank: int, store: str, checkpoint: str) -> list[float]:
    model_prices()
    seed_everything(0, workers=True, verbose=False)
    module = WanModule("tiny", lr=1e-2, warmup_steps=0)
    before = module.model.head.head.weight.detach().clone()
    trainer = make_trainer(
        max_steps=3, max_epochs=-1, callbacks=[EMAWeightAveraging(decay=0.5), Saves(checkpoint)]
    )
    trainer.fit(module, ZelligeDataModule(LatentDataModule(store), tokens_per_batch=80))
    loss = float(trainer.callback_metrics["loss"])
    return [loss, float((module.model.head.head.weight - before).abs().max())]


def test_encode_train_export_and_run_in_diffusers(tmp_path: Path, tiny_vae: Path, tiny_buckets: Path) -> None:
    media, store, checkpoint = tmp_path / "media", tmp_path / "latents", tmp_path / "run.ckpt"
    media.mkdir()
    for name in REAL_CLIPS:
        copy_to(real_clip(name), media)
    for name in ("astronaut.png", "coffee.png", "camera.png"):
        copy_to(find_media("skimage", f"data/{name}"), media)
    options = ["--vae", str(tiny_vae), "--buckets", str(tiny_buckets), "--workers", "1", "--quiet"]
    # `tiny` reads captions of 16 x 64, as the demo's text encoder writes them.
    encode([str(media), "--output", str(store), *options])

    first, second = run_distributed(train, 2, str(store), str(checkpoint), group=False)
    assert first == second
    assert 0.0 < first[0] < 100.0
    assert first[1] > 1e-3  # it did learn

    config = CONFIGS["tiny"]
    for name, more in (("trained", []), ("average", ["--ema"])):
        export([str(checkpoint), str(tmp_path / name), "--dtype", "float32", *more])
        reference = WanTransformer3DModel.from_pretrained(tmp_path / name)
        model = WanModel(config)
        load_weights(model, tmp_path / name)
        packed = pack(config, GRIDS, torch.float32)
        _, _, _, times, text, lengths = packed.arguments
        with torch.no_grad(), block_diagonal(model, lengths):
            parts = model(*packed.arguments).split(lengths)
        for i, latents in enumerate(packed.latents):
            with torch.no_grad():
                expected = reference(latents[None], times[i, None], text[i, None]).sample[0]
            assert expected.abs().max() > 1e-3
            torch.testing.assert_close(unpatchify(parts[i], GRIDS[i]), expected, rtol=0, atol=2e-5)
