"""The latent codec: faithful, causal, of unit variance."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.codec import DctCodec
from zellige_lightning.recipes.wan21.media import decode_image, find_media, fit

CODEC = DctCodec()


def smooth_clip(num_frames: int, height: int = 64, width: int = 96) -> Tensor:
    """Coloured slopes that brighten slowly, `[3, F, H, W]` in [0, 1]."""
    t, y, x = torch.meshgrid(
        *(torch.linspace(0.0, 1.0, n) for n in (num_frames, height, width)), indexing="ij"
    )
    return torch.stack((0.2 + 0.5 * x + 0.1 * t, 0.3 + 0.4 * y, 0.5 + 0.3 * torch.sin(4 * x + 3 * y)))


def psnr(a: Tensor, b: Tensor) -> float:
    return -10.0 * math.log10((a - b).square().mean().item())


@pytest.mark.parametrize(("num_frames", "floor_db"), [(1, 40.0), (9, 35.0)])
def test_round_trip_of_smooth_pictures(num_frames: int, floor_db: float) -> None:
    clip = smooth_clip(num_frames)
    latents = CODEC.encode(clip)
    assert latents.shape == (16, 1 + (num_frames - 1) // 4, 8, 12)
    assert psnr(CODEC.decode(latents), clip) > floor_db


def test_round_trip_and_variance_of_photographs() -> None:
    energy = []
    for name in ("astronaut.png", "coffee.png", "rocket.jpg", "motorcycle_left.png"):
        picture = fit(decode_image(find_media("skimage", f"data/{name}")), 192, 192)
        latents = CODEC.encode(picture)
        assert psnr(CODEC.decode(latents), picture.float() / 255) > 22.0
        energy.append(latents.square().mean(dim=(1, 2, 3)))
    per_channel = torch.stack(energy).mean(0)
    assert 0.5 < per_channel.mean() < 2.0
    assert per_channel.max() < 3.0 * per_channel.min()  # no channel dominates


def test_an_image_is_the_first_latent_of_a_video_that_begins_with_it() -> None:
    clip = (torch.rand(3, 9, 32, 48, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    whole = CODEC.encode(clip)
    assert torch.equal(CODEC.encode(clip[:, :1]), whole[:, :1])
    torch.testing.assert_close(CODEC.encode(clip[:, :5]), whole[:, :2], rtol=0.0, atol=1e-6)


def test_decoding_is_the_inverse_on_latents_of_pictures() -> None:
    latents = 0.05 * torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(CODEC.encode(CODEC.decode(latents)), latents, rtol=1e-4, atol=1e-5)


def test_bytes_and_fractions_are_one_picture() -> None:
    clip = (smooth_clip(5) * 255).to(torch.uint8)
    torch.testing.assert_close(CODEC.encode(clip), CODEC.encode(clip.float() / 255))


@pytest.mark.parametrize(
    ("shape", "says"),
    [((3, 4, 64, 64), "1 or 5"), ((3, 1, 60, 64), "multiples of 8"), ((1, 1, 64, 64), "cannot be encoded")],
)
def test_pictures_of_other_shapes_are_refused(shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(DataError, match=says):
        CODEC.encode(torch.zeros(shape))
