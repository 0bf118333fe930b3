"""The VAE of Wan2.1, from diffusers, behind the interface of a latent codec.

Legend: F frames, H, W pixels; C = 16 channels, T = 1 + (F-1)/4 latent frames, h = H/8, w = W/8.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.codec import DctCodec, LatentCodec
from zellige_lightning.recipes.wan21.patchify import LATENT_CHANNELS, check_num_frames

_SAMPLED = 4096  # values of each tensor that go into a digest


def weights_digest(module: nn.Module) -> str:
    """Identity of weights: names, shapes and evenly spaced values of every tensor, from whatever files."""
    digest = hashlib.sha256()
    for name, values in sorted(module.state_dict().items()):
        flat = values.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLED)
        digest.update(f"{name}|{tuple(values.shape)}|{values.dtype}".encode())
        digest.update(flat[::step].to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()[:16]


class WanVae:
    """Encodes to the mean of the posterior, normalised per channel as the transformer expects.

    Args:
        model: an `AutoencoderKLWan`.

    Raises:
        ConfigError: it has another number of latent channels than Wan2.1.
    """

    def __init__(self, model: Any) -> None:
        config = model.config
        if config.z_dim != LATENT_CHANNELS or len(config.latents_mean) != LATENT_CHANNELS:
            raise ConfigError(
                f"the VAE has {config.z_dim} latent channels, Wan2.1 has {LATENT_CHANNELS}",
                fix="use the VAE of Wan2.1",
            )
        self.model = model.eval().requires_grad_(False)
        shape = (1, LATENT_CHANNELS, 1, 1, 1)
        self._mean = torch.tensor(config.latents_mean, device=model.device).view(shape)
        self._std = torch.tensor(config.latents_std, device=model.device).view(shape)
        self._digest = weights_digest(model)

    def to(self, device: torch.device) -> WanVae:
        """Move the weights; returns itself."""
        self.model.to(device)
        self._mean, self._std = self._mean.to(device), self._std.to(device)
        return self

    @property
    def settings(self) -> Mapping[str, str | int]:
        return {"codec": "wan-vae-mean-1", "vae_weights": self._digest, "vae_dtype": str(self.model.dtype)}

    @torch.no_grad()
    def encode(self, frames: Tensor) -> Tensor:
        """See `LatentCodec.encode`. Raises: DataError for frames other than 4n+1, or sides not of 8."""
        check_num_frames(frames.shape[1])
        if frames.shape[2] % 8 or frames.shape[3] % 8:
            raise DataError(
                f"pictures of {tuple(frames.shape[2:])} pixels", fix="use sides that are multiples of 8"
            )
        moved = frames[None].to(self.model.device)
        scaled = moved.float() / 127.5 - 1.0 if frames.dtype == torch.uint8 else moved.float() * 2.0 - 1.0
        mean = self.model.encode(scaled.to(self.model.dtype)).latent_dist.mode().float()
        return ((mean - self._mean) / self._std)[0].cpu()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """See `LatentCodec.decode`."""
        values = latents[None].to(self.model.device).float() * self._std + self._mean
        pixels = self.model.decode(values.to(self.model.dtype)).sample.float()
        return ((pixels[0] + 1.0) / 2.0).clamp(0.0, 1.0).cpu()


def load_codec(name: str, device: torch.device, dtype: torch.dtype) -> LatentCodec:
    """`demo`, or the VAE in a local folder (or its `vae` folder), or in a repository of the Hugging Face hub.

    Only safetensors are read.

    Raises:
        ConfigError: nothing there that can be loaded.
    """
    if name == "demo":
        return DctCodec()
    from diffusers import AutoencoderKLWan

    subfolder = subfolder_of(name, "vae")
    try:
        model = AutoencoderKLWan.from_pretrained(
            name, subfolder=subfolder, use_safetensors=True, torch_dtype=dtype
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no VAE could be loaded from {name!r}: {str(error).splitlines()[0]}",
            fix="give `demo`, a folder with config.json and safetensors, or a hub name such as"
            " Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        ) from error
    return WanVae(model.to(device))


def subfolder_of(name: str, part: str) -> str:
    """Where a part of a pipeline is: in its own folder of a pipeline, or at the top of what was named."""
    folder = Path(name)
    if not folder.is_dir():
        return part  # a pipeline on the hub
    return part if (folder / part).is_dir() else ""
