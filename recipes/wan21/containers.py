"""What a file is, by its first bytes: names lie, and decoders must not guess."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

HEAD_BYTES = 400  # enough for every test below

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif"})
VIDEO_SUFFIXES = frozenset(
    {".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".gif", ".mpg", ".mpeg", ".ts", ".flv", ".wmv"}
)


class Content(NamedTuple):
    """`kind` is image or video; `container` the format as Pillow or FFmpeg calls it."""

    kind: str
    container: str


def _starts(*magic: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(magic)


def _box(*names: bytes) -> Callable[[bytes], bool]:
    return lambda head: head[4:8] in names


_TESTS: tuple[tuple[Callable[[bytes], bool], Content], ...] = (
    (_starts(b"\x89PNG\r\n\x1a\n"), Content("image", "PNG")),
    (_starts(b"\xff\xd8\xff"), Content("image", "JPEG")),
    (lambda head: head[:4] == b"RIFF" and head[8:12] == b"WEBP", Content("image", "WEBP")),
    (_starts(b"II*\x00", b"MM\x00*"), Content("image", "TIFF")),
    (_starts(b"BM"), Content("image", "BMP")),
    (lambda head: head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"), Content("image", "AVIF")),
    (_box(b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"), Content("video", "mov")),
    (_starts(b"\x1aE\xdf\xa3"), Content("video", "matroska")),
    (lambda head: head[:4] == b"RIFF" and head[8:12] == b"AVI ", Content("video", "avi")),
    (_starts(b"GIF87a", b"GIF89a"), Content("video", "gif")),
    (_starts(b"FLV\x01"), Content("video", "flv")),
    (_starts(b"\x00\x00\x01\xba"), Content("video", "mpeg")),
    (_starts(b"0&\xb2u\x8ef\xcf\x11"), Content("video", "asf")),
    (lambda head: len(head) > 376 and head[0] == head[188] == head[376] == 0x47, Content("video", "mpegts")),
)


def sniff(head: bytes) -> Content | None:
    """The content that begins with `head`; None if it is nothing that we decode."""
    return next((content for test, content in _TESTS if test(head)), None)
