"""Clips: pictures at 16 frames per second, upright, from any container. Every fault is a `DataError`.

Legend: F frames, H, W pixels. Pictures are uint8 `[3, F, H, W]`. Times are seconds since the first picture.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import av
import numpy as np
import torch
from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.patchify import check_num_frames
from zellige_lightning.recipes.wan21.pictures import fit

SAMPLE_FPS = 16.0  # the frame rate that Wan2.1 is trained on
# Before a start later than this, whole groups of pictures are skipped instead of decoded.
_SEEK_FROM_S = 2.0


@dataclass(frozen=True)
class Picture:
    """A decoded frame and when it is shown."""

    time_s: float
    end_s: float
    frame: av.VideoFrame


@contextmanager
def open_clip(
    medium: Path | IO[bytes], name: str, *, container: str | None = None, max_pixels: int | None = None
) -> Iterator[tuple[av.container.InputContainer, av.VideoStream]]:
    """The container and its first video stream.

    It is read through a Python file, and no protocol of FFmpeg is allowed: a playlist in a hostile file can
    name other files or hosts.

    Args:
        container: FFmpeg's name of the format, if it is known; nothing else is then tried.
        max_pixels: the decoder itself refuses larger pictures.

    Raises:
        DataError: missing, unreadable, or without video.
    """
    try:
        file = medium.open("rb") if isinstance(medium, Path) else medium
    except OSError as error:
        raise DataError(f"clip {name!r} does not exist", fix="correct its path in the data set") from error
    try:
        with av.open(file, format=container, options={"protocol_whitelist": ""}) as opened:
            if not opened.streams.video:
                raise DataError(f"clip {name!r} has no video stream", fix="remove the file from the data set")
            stream = opened.streams.video[0]
            if stream.codec_context is None:
                raise DataError(f"clip {name!r} cannot be decoded: unknown codec", fix="convert the file")
            stream.codec_context.thread_count = 1  # one process decodes one clip; the processes are many
            if max_pixels is not None:
                stream.codec_context.options = {"max_pixels": str(max_pixels)}
            yield opened, stream
    except (av.FFmpegError, ValueError) as error:
        what = getattr(error, "strerror", None) or error  # without the number and the path
        raise DataError(
            f"clip {name!r} cannot be decoded: {what}", fix="replace or remove the file"
        ) from error
    finally:
        if isinstance(medium, Path):
            file.close()


def decode_clip(
    medium: Path | IO[bytes],
    num_frames: int,
    *,
    start_s: float = 0.0,
    fps: float = SAMPLE_FPS,
    size: tuple[int, int] | None = None,
    name: str | None = None,
    container: str | None = None,
    pixel_aspect: float = 1.0,
    repeat_last: int = 0,
    max_pixels: int | None = None,
) -> Tensor:
    """`[3, F, H, W]`: `num_frames` pictures at `fps` from second `start_s` on, each the nearest of the file.

    Args:
        num_frames: 4n+1.
        size: (H, W) that each picture is fitted to while decoding, so that a long clip needs little memory.
        name, container, max_pixels: see `open_clip`. pixel_aspect: see `fit`.
        repeat_last: frames that may be missing at the end; the last picture stands for them.

    Raises:
        DataError: missing, truncated, unreadable, without video or shorter than asked; frames not 4n+1.
    """
    name = name or (medium.name if isinstance(medium, Path) else "without a name")
    check_num_frames(num_frames, f"the request for clip {name!r}")
    frames: list[Tensor] = []
    with open_clip(medium, name, container=container, max_pixels=max_pixels) as (opened, stream):
        seen = _pictures(opened, stream, start_s)
        for picture in _retimed(seen, name, num_frames, start_s, fps, repeat_last):
            pixels = _upright(picture.frame)
            frames.append(fit(pixels[:, None], *size, pixel_aspect=pixel_aspect)[:, 0] if size else pixels)
    return torch.stack(frames, dim=1)


def nearest(times: list[float], target: float) -> int:
    """Index of the entry of ascending `times` nearest to `target`; the earlier one of two equally near."""
    right = bisect_left(times, target)
    if right == 0:
        return 0
    if right == len(times):
        return right - 1
    return right if times[right] - target < target - times[right - 1] else right - 1


def _retimed(
    pictures: Iterable[Picture], name: str, num_frames: int, start_s: float, fps: float, repeat_last: int
) -> Iterator[Picture]:
    """The nearest picture to each of `num_frames` times; only two pictures are held at once."""
    end_s, count = 0.0, 0
    previous: Picture | None = None
    for picture in pictures:
        while count < num_frames and picture.time_s >= start_s + count / fps:
            pair = [p for p in (previous, picture) if p is not None]
            yield pair[nearest([p.time_s for p in pair], start_s + count / fps)]
            count += 1
        previous, end_s = picture, max(end_s, picture.end_s)
        if count == num_frames and end_s >= start_s + num_frames / fps:
            return
    available = max(0, int((end_s - start_s) * fps + 1e-6))  # each picture must last its whole 1/fps
    if num_frames > available + repeat_last or previous is None:
        raise DataError(
            f"clip {name!r} is too short: {num_frames} frames asked from second {start_s:.2f} on, but it"
            f" ends at second {end_s:.2f} and has {available} at {fps:g} frames per second",
            fix=f"start earlier, or ask for at most {available} frames",
        )
    for _ in range(count, num_frames):
        yield previous


def _pictures(
    opened: av.container.InputContainer, stream: av.VideoStream, start_s: float
) -> Iterator[Picture]:
    """By the file's own times, which are in order of showing."""
    rate = float(stream.average_rate or SAMPLE_FPS)
    origin: float | None = None
    if stream.start_time is not None and stream.time_base is not None and start_s > _SEEK_FROM_S:
        origin = float(stream.start_time * stream.time_base)
        opened.seek(stream.start_time + int(start_s / stream.time_base), stream=stream)
    for frame in opened.decode(stream):
        if frame.time is None:
            continue
        origin = frame.time if origin is None else origin
        known = frame.duration and frame.time_base
        duration = float(frame.duration * frame.time_base) if known else 1.0 / rate
        yield Picture(frame.time - origin, frame.time - origin + duration, frame)


def _upright(frame: av.VideoFrame) -> Tensor:
    """`[3, H, W]`, turned as the file says (telephones film sideways)."""
    pixels = frame.to_ndarray(format="rgb24")
    turned = np.ascontiguousarray(np.rot90(pixels, k=round(frame.rotation / 90)))
    return torch.from_numpy(turned).permute(2, 0, 1)
