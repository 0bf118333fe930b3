"""What a medium is, before its pictures are decoded: content, size, rate, and how many frames it gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO

import av
from PIL import Image, UnidentifiedImageError

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.clips import open_clip
from zellige_lightning.recipes.wan21.containers import (
    HEAD_BYTES,
    IMAGE_SUFFIXES,
    VIDEO_SUFFIXES,
    Content,
    sniff,
)
from zellige_lightning.recipes.wan21.manifest import MediaItem
from zellige_lightning.recipes.wan21.pictures import FORMATS

_TURNED_BY_EXIF = (5, 6, 7, 8)  # values of the orientation tag that exchange height and width
_ORIENTATION = 0x0112
# Headers and contents may differ by this much: writers count dropped pictures.
_HEADER_SLACK, _HEADER_SHARE = 2, 0.02


@dataclass(frozen=True)
class Caps:
    """What one medium may cost; more is refused before it is spent.

    Args:
        max_pixels: of one picture. max_frames: pictures in the file. max_bytes: of the file.
        max_seconds: for reading and decoding it.
    """

    max_pixels: int = 64_000_000
    max_frames: int = 1_000_000
    max_bytes: int = 16 << 30
    max_seconds: float = 300.0

    def __post_init__(self) -> None:
        if min(self.max_pixels, self.max_frames, self.max_bytes) < 1 or self.max_seconds <= 0.0:
            raise ConfigError(f"limits {self}", fix="all limits must be positive")


@dataclass(frozen=True)
class Probe:
    """A readable medium.

    Args:
        height, width: upright, with square pixels.
        num_frames: at the target rate, within the part that was asked for; 1 for an image.
        source_frames: pictures in the file. source_fps, seconds: 0 for an image.
        pixel_aspect: width over height of the file's pixels, upright.
    """

    content: Content
    height: int
    width: int
    num_frames: int = 1
    source_frames: int = 1
    source_fps: float = 0.0
    seconds: float = 0.0
    pixel_aspect: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def is_video(self) -> bool:
        return self.content.kind == "video"


def probe(item: MediaItem, caps: Caps, fps: float) -> Probe:
    """Look into a medium. A video's packets are counted, its pictures are not decoded but for the first.

    Raises:
        DataError: empty, unknown, damaged, not what its name says, or above a cap.
    """
    size = item.size()
    if size == 0:
        raise DataError("the file is empty (0 bytes)")
    if size > caps.max_bytes:
        raise DataError(f"{size} bytes, the limit is {caps.max_bytes}")
    with item.open() as file:
        content = _content(item, file)
        file.seek(0)
        if content.kind == "image":
            return _probe_image(file, content, caps)
        return _probe_clip(item, file, content, caps, fps)


def _content(item: MediaItem, file: IO[bytes]) -> Content:
    content = sniff(file.read(HEAD_BYTES))
    if content is None:
        raise DataError("its first bytes are those of no known image or video")
    suffix = PurePosixPath(item.name).suffix.lower()
    named = "image" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else content.kind
    if named != content.kind:
        raise DataError(f"named as {_a(named)} ({suffix}), it is {_a(content.kind)} ({content.container})")
    return content


def _a(kind: str) -> str:
    return f"an {kind}" if kind == "image" else f"a {kind}"


def _probe_image(file: IO[bytes], content: Content, caps: Caps) -> Probe:
    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            if width * height > caps.max_pixels:
                raise DataError(f"{height}x{width} pixels, the limit is {caps.max_pixels}")
            if getattr(image, "n_frames", 1) > 1 and content.container not in ("TIFF", "JPEG"):
                raise DataError("an animated picture: convert it to a video")
            notes = (f"{image.mode} made RGB",) if image.mode != "RGB" else ()
            if image.getexif().get(_ORIENTATION) in _TURNED_BY_EXIF:
                height, width = width, height
    except UnidentifiedImageError as error:
        raise DataError("cannot be read: unknown or damaged format") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot be read: {error}") from error
    return Probe(content, height, width, notes=notes)


def _probe_clip(item: MediaItem, file: IO[bytes], content: Content, caps: Caps, fps: float) -> Probe:
    with open_clip(file, item.name, container=content.container, max_pixels=caps.max_pixels) as opened:
        container, stream = opened
        if stream.width * stream.height > caps.max_pixels:
            raise DataError(f"{stream.height}x{stream.width} pixels, the limit is {caps.max_pixels}")
        scan = _scan(container, stream, caps)
        notes = _compared_with_header(container, stream, scan)
        rate = float(stream.average_rate or fps)
        stop_s = scan.end_s if item.end_s is None else min(item.end_s, scan.end_s)
        if stop_s <= item.start_s:
            raise DataError(
                f"it ends at second {scan.end_s:.2f}, before the cut at {item.start_s:.2f} begins"
            )
        aspect = float(stream.sample_aspect_ratio or 1.0) or 1.0
        height, width = stream.height, round(stream.width * aspect)
        if scan.turned:
            height, width, aspect = width, height, 1.0 / aspect
        frames = int((stop_s - item.start_s) * fps + 1e-6)
        notes += ("upright by its rotation tag",) if scan.turned else ()
        return Probe(content, height, width, frames, scan.count, rate, stop_s - item.start_s, aspect, notes)


@dataclass
class _Scan:
    """What the packets say: pictures, seconds from the first picture to the end, and turns by 90 degrees."""

    count: int = 0
    end_s: float = 0.0
    turned: bool = False


def _scan(container: av.container.InputContainer, stream: av.VideoStream, caps: Caps) -> _Scan:
    scan = _Scan()
    first, base = None, float(stream.time_base or 0.0)
    ends: float = 0.0
    decoded = False
    for packet in container.demux(stream):  # the last one is empty: it makes the decoder give what it holds
        if not decoded:
            for frame in packet.decode():
                decoded, scan.turned = True, round(frame.rotation / 90) % 2 == 1
        if packet.size == 0:
            continue
        scan.count += 1
        if scan.count > caps.max_frames:
            raise DataError(f"more than {caps.max_frames} pictures, which is the limit")
        time = packet.pts if packet.pts is not None else packet.dts
        if time is not None:
            first = time if first is None else min(first, time)
            ends = max(ends, (time + (packet.duration or 0)) * base)
    if not decoded or first is None:
        raise DataError("no picture of it can be decoded")
    scan.end_s = ends - first * base
    return scan


def _compared_with_header(
    container: av.container.InputContainer, stream: av.VideoStream, scan: _Scan
) -> tuple[str, ...]:
    """A note on a header that counts a little differently. Raises: DataError if much is missing."""
    difference = stream.frames - scan.count if stream.frames else 0
    if difference > max(_HEADER_SLACK, _HEADER_SHARE * stream.frames):
        raise DataError(f"truncated: its header counts {stream.frames} pictures, {scan.count} are there")
    seconds = float((container.duration or 0) / av.time_base)
    if len(container.streams) == 1 and not stream.frames and scan.end_s < 0.9 * seconds:
        raise DataError(f"truncated: its header says {seconds:.2f} s, {scan.end_s:.2f} s are there")
    return (f"header counts {stream.frames} pictures, {scan.count} are there",) if difference else ()
