"""Pictures as latents: the interface of a latent codec, and a small deterministic one without weights.

Legend: F frames, H, W pixels; C = 16 channels, T = 1 + (F-1)/4 latent frames, h = H/8, w = W/8. The VAE of
Wan2.1 has the same shape and fits behind the same interface.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.patchify import SPACE_STRIDE, TIME_STRIDE, check_num_frames


class LatentCodec(Protocol):
    """Causal: the latent of an image equals the first latent of a video that begins with it."""

    @property
    def settings(self) -> Mapping[str, str | int]:
        """What the values depend on; part of the identity of a latent store."""
        ...

    def encode(self, frames: Tensor) -> Tensor:
        """`[3, F, H, W]` uint8, or float in [0, 1] -> `[16, T, h, w]` float32."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """`[16, T, h, w]` -> `[3, F, H, W]` float32 in [0, 1]."""
        ...


# ITU-R BT.601 full range: rows Y, Cb, Cr of (R, G, B) in [0, 1], centred by subtracting grey.
_YCBCR = (
    (0.299, 0.587, 0.114),
    (-0.168735892, -0.331264108, 0.5),
    (0.5, -0.418687589, -0.081312411),
)
# (colour plane, vertical frequency, horizontal frequency) of each coefficient: the ten lowest of brightness,
# three of each colour difference.
_CHANNELS = tuple((0, u, s - u) for s in range(4) for u in range(s + 1)) + tuple(
    (plane, u, v) for plane in (1, 2) for u, v in ((0, 0), (0, 1), (1, 0))
)
# Root mean square of the coefficients over the windows of the demo (images 0.53, videos 0.50): the mean
# variance of the channels is about 1.
_SCALE = 0.514


class DctCodec:
    """The 16 lowest coefficients of an 8x8 DCT of YCbCr pictures, rotated and scaled to about unit variance.

    One coefficient alone, the mean brightness, holds most of the variance of pictures. A fixed orthogonal
    matrix (Hadamard) spreads it over all channels, which then have like variance and are correlated, as those
    of a learnt VAE: distances between latents stay distances between pictures. The first frame is coded
    alone; each later latent frame is the mean of its four pictures, and is decoded to four equal ones.
    """

    @property
    def settings(self) -> Mapping[str, str | int]:
        return {"codec": "dct-ycbcr-hadamard-1"}

    @cached_property
    def _basis(self) -> Tensor:
        """`[16, 3, 8, 8]`: channel = <basis, block of RGB - grey>."""
        colour = torch.tensor(_YCBCR, dtype=torch.float64)
        rows = [torch.einsum("c,ij->cij", colour[plane], _wave(u, v)) for plane, u, v in _CHANNELS]
        return (torch.einsum("kl,lcij->kcij", _hadamard(), torch.stack(rows)) / _SCALE).float()

    @cached_property
    def _dual(self) -> Tensor:
        """`[16, 3, 8, 8]`: block of RGB - grey = sum over channels of value * dual."""
        colour = torch.tensor(_YCBCR, dtype=torch.float64).inverse()
        rows = [torch.einsum("c,ij->cij", colour[:, plane], _wave(u, v)) for plane, u, v in _CHANNELS]
        return (torch.einsum("kl,lcij->kcij", _hadamard(), torch.stack(rows)) * _SCALE).float()

    def encode(self, frames: Tensor) -> Tensor:
        """See `LatentCodec.encode`.

        Raises:
            DataError: not `[3, 4n+1, 8a, 8b]`.
        """
        if (
            frames.dim() != 4
            or frames.shape[0] != 3
            or frames.shape[2] % SPACE_STRIDE
            or frames.shape[3] % SPACE_STRIDE
        ):
            raise DataError(
                f"pictures of shape {tuple(frames.shape)} cannot be encoded",
                fix=f"give [3, frames, height, width] with sides that are multiples of {SPACE_STRIDE} pixels",
            )
        check_num_frames(frames.shape[1])
        pictures = frames.transpose(0, 1)  # [F, 3, H, W]
        first = self._transform(
            pictures[:1]
        )  # alone, so that images and videos take one path, to the last bit
        later = (
            self._transform(pictures[1:]).unflatten(0, (-1, TIME_STRIDE)).mean(1)
            if len(pictures) > 1
            else first[:0]
        )
        return torch.cat((first, later)).transpose(0, 1).contiguous()

    def decode(self, latents: Tensor) -> Tensor:
        """See `LatentCodec.decode`."""
        frames = F.conv_transpose2d(latents.float().transpose(0, 1), self._dual, stride=SPACE_STRIDE) + 0.5
        pictures = torch.cat((frames[:1], frames[1:].repeat_interleave(TIME_STRIDE, dim=0)))
        return pictures.transpose(0, 1).clamp(0.0, 1.0)

    def _transform(self, pictures: Tensor) -> Tensor:
        """`[F, 3, H, W]` -> `[F, 16, h, w]`."""
        rgb = pictures.float() / 255.0 if pictures.dtype == torch.uint8 else pictures.float()
        return F.conv2d(rgb - 0.5, self._basis, stride=SPACE_STRIDE)


def _wave(u: int, v: int) -> Tensor:
    """Orthonormal 8x8 cosine of vertical frequency u and horizontal frequency v."""

    def axis(k: int) -> Tensor:
        n = torch.arange(SPACE_STRIDE, dtype=torch.float64)
        norm = math.sqrt((1.0 if k == 0 else 2.0) / SPACE_STRIDE)
        return norm * torch.cos(math.pi * (2 * n + 1) * k / (2 * SPACE_STRIDE))

    return torch.outer(axis(u), axis(v))


def _hadamard() -> Tensor:
    """Orthogonal, symmetric 16x16 matrix with entries +-1/4."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    four = torch.kron(two, two)
    return torch.kron(four, four) / 4.0
