"""Pictures and clips drawn at each validation from the captions of held-out samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.loader import GlobalBatchLoader
from zellige_lightning.placement import GlobalBatch, Sequence
from zellige_lightning.placing import PlacingStrategy
from zellige_lightning.recipes.wan21.codec import LatentCodec
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.recipes.wan21.patchify import unpatchify
from zellige_lightning.recipes.wan21.pictures_out import write_pictures
from zellige_lightning.recipes.wan21.sampler import SamplerSettings, whole_samples
from zellige_lightning.recipes.wan21.vae import WanVae, load_codec


class SampleMedia(Callback):
    """Draws samples at the end of each validation, with the averaged weights where there are some, and writes
    them to `samples/step-<n>` beside the logs: PNG and MP4, with their captions in `samples.json`.

    Sampling is planned like training: what does not fit on one rank is split. The ranks share the decoding.

    Args:
        vae: what decodes, as for `zellige-encode --vae`: `demo`, a folder, or a name on the hub. It must be
            what the samples were encoded with.
        num_images, num_videos: of the validation samples, in their order.
        solver, steps, guidance: see `SamplerSettings`.

    Raises:
        ConfigError: nothing to draw, settings out of range, or a model, data or strategy of other kinds.
        DataError: another VAE than that of the samples; files that cannot be written.
    """

    def __init__(
        self,
        vae: str,
        num_images: int = 4,
        num_videos: int = 2,
        solver: str = "unipc",
        steps: int = 30,
        guidance: float = 5.0,
    ) -> None:
        if min(num_images, num_videos) < 0 or num_images + num_videos < 1:
            raise ConfigError(
                f"num_images={num_images}, num_videos={num_videos}", fix="draw at least one sample"
            )
        self.vae, self.num_images, self.num_videos = vae, num_images, num_videos
        self.settings = SamplerSettings(solver, steps, guidance)
        self._codec: LatentCodec | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(trainer.strategy, PlacingStrategy) or not isinstance(pl_module, WanModule):
            raise ConfigError(
                f"samples of {type(pl_module).__name__} under {type(trainer.strategy).__name__}",
                fix='train a WanModule with strategy="zellige", or leave the callback SampleMedia out',
            )
        # Before callbacks that put averaged weights into the model for a validation and take them out again.
        trainer.callbacks = sorted(trainer.callbacks, key=lambda callback: callback is not self)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        loader = _loader_of(trainer)
        strategy: Any = trainer.strategy
        assert isinstance(pl_module, WanModule) and isinstance(strategy, PlacingStrategy)
        flow = pl_module.flow.for_evaluation(1)
        drawn: dict[str, Tensor] = {}
        batch = GlobalBatch.of(0, 0, [(s.key, s.bucket) for s in self._chosen(loader)])
        for wave in strategy.plan_evaluation(loader, batch):
            wave = wave.to(pl_module.device)
            tokens = strategy.evaluate("sample", wave, flow, self.settings)
            for key, share in whole_samples(wave, tokens).items():
                drawn[key] = strategy.reduce(share, reduce_op="sum")
        logs = Path(trainer.log_dir or trainer.default_root_dir)  # rank 0's, on all ranks
        folder = logs / "samples" / f"step-{trainer.global_step:07d}"
        agreement = strategy.services.agreement
        mine = list(batch.sequences)[agreement.rank :: agreement.world_size]
        agreement.together(lambda: self._write(folder, mine, drawn, pl_module.device, loader))
        if agreement.rank == 0:
            _write_captions(folder, loader, batch.sequences)

    def _chosen(self, loader: GlobalBatchLoader) -> list[Sequence]:
        """The first images and videos."""
        left = {False: self.num_images, True: self.num_videos}
        chosen = []
        for sample in loader.source.samples:
            bucket = loader.catalog.bucket_for(sample.grid)
            if left[bucket.is_video]:
                left[bucket.is_video] -= 1
                chosen.append(Sequence(len(chosen), sample.key, bucket))
        return chosen

    def _write(
        self,
        folder: Path,
        sequences: list[Sequence],
        drawn: dict[str, Tensor],
        device: torch.device,
        loader: GlobalBatchLoader,
    ) -> None:
        codec = self._codec_on(device, loader)
        for sequence in sequences:
            latents = unpatchify(drawn[sequence.key], sequence.bucket.grid)
            write_pictures(folder / _stem(sequence), codec.decode(latents))
        self._codec_on(torch.device("cpu"), loader)

    def _codec_on(self, device: torch.device, loader: GlobalBatchLoader) -> LatentCodec:
        """The codec, on the device only while it decodes."""
        if self._codec is None:
            self._codec = load_codec(self.vae, torch.device("cpu"), torch.float32)
            _check_codec(self._codec, loader)
            if isinstance(self._codec, WanVae):
                self._codec.model.enable_tiling()  # a long video decoded at once needs more than training
        return self._codec.to(device) if isinstance(self._codec, WanVae) else self._codec


def _loader_of(trainer: Trainer) -> GlobalBatchLoader:
    """Of the first validation dataloader. Raises: ConfigError if it is not one of ours."""
    loaders = trainer.val_dataloaders
    first = loaders[0] if isinstance(loaders, list) else loaders
    loader = getattr(first, "loader", None)
    if not isinstance(loader, GlobalBatchLoader):
        raise ConfigError(
            "validation samples that ZelligeDataModule does not serve",
            fix="wrap the data module in ZelligeDataModule, or leave the callback SampleMedia out",
        )
    return loader


def _check_codec(codec: LatentCodec, loader: GlobalBatchLoader) -> None:
    stored = getattr(loader.source, "settings", {})
    differing = [name for name in ("codec", "vae_weights") if stored.get(name) != codec.settings.get(name)]
    if differing:
        text = ", ".join(f"{n}: {codec.settings.get(n)!r}, not {stored.get(n)!r}" for n in differing)
        raise DataError(
            f"the samples were encoded by another VAE than would decode them ({text})",
            fix="set callbacks.samples.vae to what zellige-encode was given as --vae",
        )


def _stem(sequence: Sequence) -> str:
    return f"{sequence.index:02d}-{sequence.bucket.name}"


def _write_captions(folder: Path, loader: GlobalBatchLoader, sequences: tuple[Sequence, ...]) -> None:
    caption = getattr(loader.source, "caption", lambda key: None)
    rows = [{"file": _stem(s), "key": s.key, "caption": caption(s.key)} for s in sequences]
    (folder / "samples.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
