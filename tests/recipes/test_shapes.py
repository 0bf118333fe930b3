"""Pixels, latents and tokens."""

from __future__ import annotations

import pytest
import torch

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.patchify import patchify, pixel_shape, token_grid, unpatchify


@pytest.mark.parametrize(
    ("shape", "grid", "num_tokens"),
    [
        ((241, 1080, 1920), (61, 68, 120), 497_760),  # 15 s of 1080p: 1080 rows are rounded up to 1088
        ((161, 1080, 1920), (41, 68, 120), 334_560),
        ((161, 720, 1280), (41, 45, 80), 147_600),
        ((81, 480, 832), (21, 30, 52), 32_760),
        ((1, 256, 256), (1, 16, 16), 256),
    ],
)
def test_token_rule(shape: tuple[int, int, int], grid: tuple[int, int, int], num_tokens: int) -> None:
    assert token_grid(*shape) == grid
    assert grid[0] * grid[1] * grid[2] == num_tokens


def test_pixel_shape_is_the_inverse_on_whole_tokens() -> None:
    assert pixel_shape((61, 68, 120)) == (241, 1088, 1920)
    assert token_grid(*pixel_shape((9, 10, 16))) == (9, 10, 16)


@pytest.mark.parametrize(("num_frames", "nearest"), [(144, "141 or 145"), (2, "1 or 5"), (0, "use 1 frames")])
def test_other_than_4n_plus_1_frames_names_the_nearest(num_frames: int, nearest: str) -> None:
    with pytest.raises(DataError, match=nearest):
        token_grid(num_frames, 64, 64)


def test_patches_hold_channel_row_column_and_return() -> None:
    latents = torch.arange(16 * 3 * 4 * 6, dtype=torch.float32).reshape(16, 3, 4, 6)
    tokens = patchify(latents)
    assert tokens.shape == (3 * 2 * 3, 64)
    t, y, x = 2, 1, 2
    patch = latents[:, t, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2]
    assert torch.equal(tokens[t * 6 + y * 3 + x], patch.flatten())
    assert torch.equal(unpatchify(tokens, (3, 2, 3)), latents)


def test_odd_latents_are_refused() -> None:
    with pytest.raises(DataError, match="multiple of 16 pixels"):
        patchify(torch.zeros(16, 1, 3, 4))
