"""Shapes of Wan2.1: pixels -> latents -> tokens, and back.

Legend: F frames, H, W pixels, C = 16 latent channels, (T, h, w) latent frames, rows, columns (8x8 pixels).
A token holds a patch of (1, 2, 2) latents as a vector of 64, ordered (channel, pt, ph, pw): the order of a
row of the patch embedding's Conv3d weight. Tokens are ordered t, then y, then x.
"""

from __future__ import annotations

from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.placement.sequence import Grid

LATENT_CHANNELS = 16
PATCH = (1, 2, 2)
TOKEN_DIM = LATENT_CHANNELS * PATCH[0] * PATCH[1] * PATCH[2]
TIME_STRIDE, SPACE_STRIDE = 4, 8
PIXELS_PER_TOKEN = SPACE_STRIDE * PATCH[1]


def check_num_frames(num_frames: int, name: str = "the clip") -> None:
    """Raises `DataError`, naming the nearest legal counts, unless `num_frames` is 4n+1."""
    if num_frames >= 1 and (num_frames - 1) % TIME_STRIDE == 0:
        return
    below = max(1, (num_frames - 1) // TIME_STRIDE * TIME_STRIDE + 1)
    above = below + TIME_STRIDE if num_frames > 1 else 1
    nearest = f"{below} or {above}" if above != below else f"{below}"
    raise DataError(
        f"{name} has {num_frames} frames, not 4n+1: the first frame is coded alone, the others by four",
        fix=f"use {nearest} frames",
    )


def token_grid(num_frames: int, height: int, width: int) -> Grid:
    """Grid in tokens of a clip. A size that is no multiple of 16 pixels is rounded up (1080 -> 1088 rows).

    Raises:
        DataError: a number of frames other than 4n+1, or an empty picture.
    """
    check_num_frames(num_frames)
    if min(height, width) < 1:
        raise DataError(
            f"a picture of {height}x{width} pixels", fix="give a height and a width of at least 1"
        )
    latent_frames = 1 + (num_frames - 1) // TIME_STRIDE
    return latent_frames, -(-height // PIXELS_PER_TOKEN), -(-width // PIXELS_PER_TOKEN)


def pixel_shape(grid: Grid) -> tuple[int, int, int]:
    """(F, H, W) of the clip that fills `grid` exactly."""
    frames, rows, columns = grid
    return TIME_STRIDE * (frames - 1) + 1, rows * PIXELS_PER_TOKEN, columns * PIXELS_PER_TOKEN


def patchify(latents: Tensor) -> Tensor:
    """`[C, T, h, w]` -> `[T * h/2 * w/2, 64]`.

    Raises:
        DataError: an odd number of rows or columns.
    """
    channels, frames, height, width = latents.shape
    if height % PATCH[1] or width % PATCH[2]:
        raise DataError(
            f"latents of {height}x{width} cannot be cut into 2x2 patches",
            fix=f"resize the pictures to a multiple of {PIXELS_PER_TOKEN} pixels",
        )
    # [C, T, h, w] -> [C, T, h/2, 2, w/2, 2] -> [T, h/2, w/2, C, 2, 2] -> [L, C*2*2]
    patches = latents.reshape(channels, frames, height // 2, 2, width // 2, 2)
    return patches.permute(1, 2, 4, 0, 3, 5).reshape(-1, channels * 4)


def unpatchify(tokens: Tensor, grid: Grid) -> Tensor:
    """`[L, 64]` -> `[C, T, h, w]`; the inverse of `patchify`."""
    frames, rows, columns = grid
    patches = tokens.reshape(frames, rows, columns, -1, 2, 2)
    # [T, h/2, w/2, C, 2, 2] -> [C, T, h/2, 2, w/2, 2] -> [C, T, h, w]
    return patches.permute(3, 0, 1, 4, 2, 5).reshape(-1, frames, rows * 2, columns * 2)
