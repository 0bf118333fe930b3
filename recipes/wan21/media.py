"""Images and clips from files: RGB, 16 frames per second, the size of a bucket. Every fault is a `DataError`.

Legend: F frames, H, W pixels. Pictures are uint8 `[3, F, H, W]`; an image has F = 1.
"""

from __future__ import annotations

import importlib.util
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.patchify import check_num_frames

SAMPLE_FPS = 16.0  # the frame rate that Wan2.1 is trained on


def find_media(package: str, name: str) -> Path:
    """Path of a data file inside an installed package, found without importing the package.

    Raises:
        DataError: the package or the file is not there.
    """
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise DataError(
            f"package {package!r} is not installed", fix="install the extra `demo` of this package"
        )
    path = Path(folders[0]) / name
    if not path.is_file():
        raise DataError(
            f"package {package!r} has no file {name!r}",
            fix="install the release that the extra `demo` asks for",
        )
    return path


def decode_image(path: Path) -> Tensor:
    """`[3, 1, H, W]`: upright by its EXIF tag, RGB from any mode, transparency on white.

    Raises:
        DataError: missing, truncated or unreadable.
    """
    try:
        with Image.open(path) as image:
            rgb = _to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError as error:
        raise DataError(
            f"image {path.name!r} does not exist", fix="correct its path in the data set"
        ) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(
            f"image {path.name!r} cannot be read: {error}", fix="replace or remove the file"
        ) from error
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1)[:, None].contiguous()


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":  # 16 bits per pixel; Pillow itself would cut at 255
        values = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((values / max(255.0, float(values.max())) * 255.0).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def decode_clip(
    path: Path,
    num_frames: int,
    *,
    start_s: float = 0.0,
    fps: float = SAMPLE_FPS,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """`[3, F, H, W]`: `num_frames` pictures at `fps` from second `start_s` on, each the nearest of the file.

    Args:
        num_frames: 4n+1.
        size: (H, W) that each picture is fitted to while decoding, so that a long clip needs little memory.

    Raises:
        DataError: missing, truncated, unreadable, without video or shorter than asked; frames not 4n+1.
    """
    check_num_frames(num_frames, f"the request for clip {path.name!r}")
    shown = _decode(path, start_s, start_s + num_frames / fps, size)
    end_s = max((picture.end_s for picture in shown), default=0.0)
    available = max(0, int((end_s - start_s) * fps + 1e-6))  # each picture must last its whole 1/fps
    if num_frames > available:
        raise DataError(
            f"clip {path.name!r} is too short: {num_frames} frames asked from second {start_s:.2f} on, but it"
            f" ends at second {end_s:.2f} and has {available} at {fps:g} frames per second",
            fix=f"start earlier, or ask for at most {available} frames",
        )
    times = [picture.time_s for picture in shown]
    picked = [nearest(times, start_s + i / fps) for i in range(num_frames)]
    return torch.stack([shown[i].pixels for i in picked], dim=1)


def nearest(times: list[float], target: float) -> int:
    """Index of the entry of ascending `times` nearest to `target`; the earlier one of two equally near."""
    right = bisect_left(times, target)
    if right == 0:
        return 0
    if right == len(times):
        return right - 1
    return right if times[right] - target < target - times[right - 1] else right - 1


@dataclass(frozen=True)
class _Shown:
    """A picture `[3, H, W]` and when it is shown, in seconds since the first one."""

    time_s: float
    end_s: float
    pixels: Tensor


def _decode(path: Path, start_s: float, stop_s: float, size: tuple[int, int] | None) -> list[_Shown]:
    """The pictures shown between two times and the next one, by rising time."""
    if not path.is_file():
        raise DataError(f"clip {path.name!r} does not exist", fix="correct its path in the data set")
    shown: list[_Shown] = []
    try:
        with av.open(str(path)) as container:
            for time_s, end_s, frame in _frames(container, path):
                if end_s > start_s:
                    pixels = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
                    shown.append(_Shown(time_s, end_s, fit(pixels[:, None], *size)[:, 0] if size else pixels))
                if time_s > stop_s:
                    break
    except av.FFmpegError as error:
        raise DataError(
            f"clip {path.name!r} cannot be decoded: {error}", fix="replace or remove the file"
        ) from error
    return sorted(shown, key=lambda picture: picture.time_s)


def _frames(
    container: av.container.InputContainer, path: Path
) -> Iterator[tuple[float, float, av.VideoFrame]]:
    """(first second, last second, frame) by the file's own times, counted from the first picture."""
    if not container.streams.video:
        raise DataError(f"clip {path.name!r} has no video stream", fix="remove the file from the data set")
    stream = container.streams.video[0]
    rate = float(stream.average_rate or SAMPLE_FPS)
    origin: float | None = None
    for frame in container.decode(stream):
        if frame.time is None:
            continue
        origin = frame.time if origin is None else origin
        duration = (
            float(frame.duration * frame.time_base) if frame.duration and frame.time_base else 1.0 / rate
        )
        yield frame.time - origin, frame.time - origin + duration, frame


def fit(pictures: Tensor, height: int, width: int) -> Tensor:
    """Resize so that `[3, F, H, W]` just covers (height, width), then cut the centre out of it."""
    old_height, old_width = pictures.shape[-2:]
    scale = max(height / old_height, width / old_width)
    new = max(height, round(old_height * scale)), max(width, round(old_width * scale))
    frames = pictures.transpose(0, 1)
    if new != (old_height, old_width):
        resized = F.interpolate(frames.float(), size=new, mode="bicubic", antialias=True, align_corners=False)
        frames = resized.round().clamp(0, 255).to(torch.uint8)
    top, left = (new[0] - height) // 2, (new[1] - width) // 2
    return frames[:, :, top : top + height, left : left + width].transpose(0, 1)
