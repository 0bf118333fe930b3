"""The data module of the demo: encodes windows of packaged media once, then serves them from stores."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement import Catalog
from zellige_lightning.recipes.wan21.codec import DctCodec, LatentCodec
from zellige_lightning.recipes.wan21.demo_media import (
    HELD_OUT_IMAGES,
    TRAIN_IMAGES,
    Medium,
    Window,
    demo_buckets,
    describe,
    plan_clips,
    plan_images,
)
from zellige_lightning.recipes.wan21.encode import Encoded, build_store
from zellige_lightning.recipes.wan21.patchify import patchify
from zellige_lightning.recipes.wan21.store import LatentStore, Settings, settings_digest
from zellige_lightning.recipes.wan21.text import HashedTextEncoder, TextEncoder
from zellige_lightning.sources import Sample

SPLITS = ("train", "held_out")
_WINDOWS_VERSION = 1  # part of the identity of the cache: raise it when media, windows or captions change


class DemoDataModule(LightningDataModule):
    """Mixed images and videos from the packages of the extra `demo`.

    Args:
        cache_dir: folder of the latent stores; each combination of settings has its own folder in it.
        num_images, num_videos: training windows. num_held_out: windows of each kind that training never sees.
        text_len, text_dim: of the caption embedding.
        seed: of the windows.
        num_workers: of the data loaders.

    Raises:
        ConfigError: fewer than one window of a kind.
    """

    def __init__(
        self,
        cache_dir: str = "outputs/demo-latents",
        num_images: int = 336,
        num_videos: int = 108,
        num_held_out: int = 35,
        text_len: int = 16,
        text_dim: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        if min(num_images, num_videos, num_held_out) < 1:
            raise ConfigError(
                "the demo needs images, videos and held-out windows", fix="ask for at least one of each"
            )
        self.cache_dir, self.seed, self.num_workers = Path(cache_dir), seed, num_workers
        self.counts = (num_images, num_videos, num_held_out)
        self.codec: LatentCodec = DctCodec()
        self.text: TextEncoder = HashedTextEncoder(text_len, text_dim)
        self._stores: dict[str, LatentStore] = {}

    @property
    def catalog(self) -> Catalog:
        return Catalog(demo_buckets())

    @property
    def settings(self) -> Settings:
        """What the stores depend on."""
        counts = dict(zip(("images", "videos", "held_out"), self.counts, strict=True))
        return {
            "windows": _WINDOWS_VERSION,
            "seed": self.seed,
            **counts,
            **self.codec.settings,
            **self.text.settings,
        }

    @property
    def folder(self) -> Path:
        """The cache of these settings."""
        return self.cache_dir / settings_digest(self.settings, ())

    def windows(self, split: str) -> list[Window]:
        """The windows of `train` or `held_out`, images first."""
        num_images, num_videos, num_held_out = self.counts
        if split == "held_out":
            images = plan_images(split, HELD_OUT_IMAGES, num_held_out, self.seed)
            return images + plan_clips(split, num_held_out, self.seed)
        return plan_images(split, TRAIN_IMAGES, num_images, self.seed) + plan_clips(
            split, num_videos, self.seed
        )

    def prepare_data(self) -> None:
        """Encode what is missing. Lightning calls this in one process per node."""
        decode = lru_cache(maxsize=None)(Medium.decode)  # only while encoding: the pictures are large
        for split in SPLITS:
            windows = {window.key: window for window in self.windows(split)}

            def encode(sample: Sample, windows: dict[str, Window] = windows) -> Encoded:
                window = windows[sample.key]
                return self._encode(window, window.cut(decode(window.medium)))

            samples = [Sample(window.key, window.bucket.grid) for window in windows.values()]
            build_store(self.folder / split, self.settings, samples, encode)

    def setup(self, stage: str | None = None) -> None:
        self._stores = {split: LatentStore(self.folder / split, self.settings) for split in SPLITS}

    def store(self, split: str) -> LatentStore:
        """The latents of `train` or `held_out`, after `setup`."""
        return self._stores[split]

    def train_dataloader(self) -> DataLoader[Sample]:
        return self._loader("train")

    def val_dataloader(self) -> DataLoader[Sample]:
        return self._loader("held_out")

    def _loader(self, split: str) -> DataLoader[Sample]:
        return DataLoader(self._stores[split], batch_size=None, num_workers=self.num_workers)  # type: ignore[arg-type]

    def _encode(self, window: Window, pictures: Tensor) -> Encoded:
        caption = describe(window, pictures)
        latents = patchify(self.codec.encode(pictures))
        return Encoded(latents.to(torch.float16), self.text.encode(caption).to(torch.float16), caption)
