"""Writes decoded samples: PNG for an image, H.264 in MP4 for a video."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
from PIL import Image
from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.clips import SAMPLE_FPS


def write_pictures(stem: Path, frames: Tensor) -> Path:
    """The file that was written.

    Args:
        stem: its path without extension.
        frames: `[3, F, H, W]` in [0, 1].

    Raises:
        DataError: the disk is full or read-only.
    """
    pictures = (frames.clamp(0.0, 1.0) * 255.0).round().byte().permute(1, 2, 3, 0).cpu().numpy()
    path = stem.with_name(stem.name + (".png" if len(pictures) == 1 else ".mp4"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if len(pictures) == 1:
            Image.fromarray(pictures[0]).save(path)
        else:
            _write_clip(path, list(pictures))
    except OSError as error:
        raise DataError(
            f"sample {path.name!r} cannot be written: {error.strerror or error}",
            fix="free some space, or choose a folder that can be written",
        ) from error
    return path


def _write_clip(path: Path, pictures: list[object]) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(SAMPLE_FPS))
        stream.height, stream.width = pictures[0].shape[:2]  # type: ignore[attr-defined]
        stream.pix_fmt = "yuv420p"
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
