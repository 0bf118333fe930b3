"""The demo: packaged media in, latents out, a small model that learns from them, pictures at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.recipes.packing import block_diagonal
from zellige_lightning.batch import local_batch
from zellige_lightning.errors import ConfigError
from zellige_lightning.placement import GlobalBatch, Sequence
from zellige_lightning.recipes.wan21.demo_data import DemoDataModule
from zellige_lightning.recipes.wan21.demo_media import CLIPS, HELD_OUT_IMAGES, HELD_OUT_TIME, TRAIN_IMAGES
from zellige_lightning.recipes.wan21.flow import FlowMatching
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.recipes.wan21.patchify import pixel_shape
from zellige_lightning.recipes.wan21.sample import save_samples
from zellige_lightning.sources import GlobalBatchSampler, TokenSource


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DemoDataModule:
    module = DemoDataModule(str(tmp_path_factory.mktemp("latents")), num_images=168, num_videos=54)
    module.prepare_data()
    module.setup()
    return module


def held_out(data: DemoDataModule) -> list[Sequence]:
    return [Sequence(0, s.key, data.catalog.bucket_for(s.grid)) for s in data.store("held_out").samples]


def test_every_bucket_has_samples_and_one_video_can_dominate_a_batch(data: DemoDataModule) -> None:
    source = data.train_dataloader().dataset
    assert isinstance(source, TokenSource)
    names = {data.catalog.bucket_for(sample.grid).name for sample in source.samples}
    assert names == {bucket.name for bucket in data.catalog}
    sizes = [bucket.num_tokens for bucket in data.catalog]
    assert (min(sizes), max(sizes)) == (16, 1440)
    assert data.val_dataloader().dataset is data.store("held_out")


def test_held_out_windows_share_no_picture_with_training(data: DemoDataModule) -> None:
    used: dict[str, dict[str, set[int]]] = {}
    for split in ("train", "held_out"):
        for window in data.windows(split):
            frames = range(window.start, window.start + pixel_shape(window.bucket.grid)[0])
            used.setdefault(window.medium.name, {}).setdefault(split, set()).update(frames)
    assert {m.name for m in (*TRAIN_IMAGES, *HELD_OUT_IMAGES, *CLIPS)} == set(used)
    for clip in CLIPS:
        train, other = used.pop(clip.name).values()
        assert max(train) < clip.num_frames * (1 - HELD_OUT_TIME) + 1 <= min(other) + 1
        assert not train & other
        assert max(other) < clip.num_frames
    assert all(len(splits) == 1 for splits in used.values())


def test_latents_have_unit_variance_and_captions_say_what_is_seen(data: DemoDataModule) -> None:
    store = data.store("held_out")
    squares = [
        store.read_tokens(s, range(s.num_tokens))["latents"].float().square().mean() for s in held_out(data)
    ]
    assert 0.7 < torch.stack(squares).mean() < 1.5
    captions = {key: store.caption(key) for key in (s.key for s in store.samples)}
    assert captions["held_out/coffee/0"].startswith("coffee, ")
    assert captions["held_out/coffee/0"].endswith("photograph")
    assert all("motion" in text for key, text in captions.items() if "/bikes/" in key)
    words = store.read_sequence(held_out(data)[0])["text"].float()
    expected = data.text.encode(captions["held_out/coffee/0"])
    torch.testing.assert_close(words, expected, rtol=1e-2, atol=1e-2)


def test_a_second_run_encodes_nothing_and_other_settings_have_their_own_folder(data: DemoDataModule) -> None:
    before = {p: p.stat().st_mtime_ns for p in data.folder.rglob("*.safetensors")}
    again = DemoDataModule(str(data.cache_dir), num_images=168, num_videos=54)
    again.prepare_data()
    assert again.folder == data.folder
    assert before == {p: p.stat().st_mtime_ns for p in data.folder.rglob("*.safetensors")}
    assert DemoDataModule(str(data.cache_dir), seed=1).folder != data.folder


def test_windows_of_each_kind_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="images, videos and held-out"):
        DemoDataModule(str(tmp_path), num_videos=0)


def batches(data: DemoDataModule, count: int) -> Iterator[GlobalBatch]:
    sampler = GlobalBatchSampler(
        data.store("train").samples, data.catalog, tokens_per_batch=2000, video_token_share=0.7
    )
    for epoch in range(count):
        for batch in sampler.epoch_batches(epoch, 0, 1):
            yield batch
            if (count := count - 1) == 0:
                return


@torch.no_grad()
def held_out_losses(module: WanModule, data: DemoDataModule) -> tuple[list[float], list[float]]:
    """Loss of each held-out image and of each held-out video, one fixed draw each."""
    losses: tuple[list[float], list[float]] = [], []
    flow = module.flow.for_evaluation(0)
    for s in held_out(data):
        alone = local_batch(GlobalBatch.of(0, 0, [(s.key, s.bucket)]), data.store("held_out"))
        losses[s.bucket.is_video].append(module.per_token_loss(alone, flow, 0).mean().item())
    return losses


def test_images_and_videos_are_both_learnt(data: DemoDataModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured: 50 steps lower the loss of held-out images by 49 % and of videos by 53 %."""
    torch.manual_seed(0)
    module = WanModule("tiny", lr=2e-3, warmup_steps=10)
    monkeypatch.setattr(module, "log", lambda *args, **kwargs: None)
    before = held_out_losses(module, data)
    assert min(map(len, before)) >= 32
    configured = module.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for batch in batches(data, 40):
        mine = local_batch(batch, data.store("train"))
        with block_diagonal(module, mine.lengths):
            module.training_step(mine, 0).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    for mine, first in zip(held_out_losses(module, data), before, strict=True):
        assert sum(mine) < 0.7 * sum(first)


def test_samples_are_drawn_below_real_pictures(data: DemoDataModule, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WanModule("tiny").model
    path = tmp_path / "samples.png"
    save_samples(
        path, model, FlowMatching(), data.codec, data.store("held_out"), data.catalog, pictures=3, steps=2
    )
    with Image.open(path) as image:
        assert image.size == (3 * 132, 4 * 132)
        pixels = torch.from_numpy(np.array(image)).float()
    real, made = pixels[10:60, 10:90], pixels[142:192, 10:90]
    assert real.std() > 20.0
    assert not torch.equal(real, made)
