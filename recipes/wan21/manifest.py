"""What a data set consists of: media with captions, wherever they are listed; what was left out and why."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

from zellige_lightning.errors import DataError

# Why something was left out: it cannot be read; it does not suit the buckets; a table names it and it is not
# there; the listing has no use for it.
UNREADABLE, UNFIT, MISSING, UNLISTED = "unreadable", "unfit", "missing", "unlisted"


@dataclass(frozen=True)
class MediaItem:
    """A medium and its caption, not opened yet.

    Args:
        key: names the sample for ever.
        path: of the file, or of the tar that holds it.
        offset, num_bytes: where it lies in a tar; the whole file where `num_bytes` is None.
        start_s, end_s: the part of a longer video, in seconds.
        name: of the file as its user knows it; the suffix says what it pretends to be.
    """

    key: str
    path: str
    caption: str
    name: str
    offset: int = 0
    num_bytes: int | None = None
    start_s: float = 0.0
    end_s: float | None = None

    @property
    def request(self) -> str:
        """Identity of what was asked for: a caption or a cut that changes makes another sample."""
        text = repr((self.key, self.caption, self.start_s, self.end_s))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def stamp(self) -> str:
        """Changes whenever the file is written. Raises: DataError if it is not there."""
        try:
            stat = os.stat(self.path)
        except OSError as error:
            raise DataError(
                f"{self.name!r} cannot be read: {error.strerror}", fix="restore the file"
            ) from error
        return f"{stat.st_size}:{stat.st_mtime_ns}:{self.offset}:{self.num_bytes}"

    def size(self) -> int:
        """In bytes."""
        return self.num_bytes if self.num_bytes is not None else os.stat(self.path).st_size

    def open(self) -> IO[bytes]:
        """Its bytes, read from where they are. Raises: DataError."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 (the caller closes it)
        except OSError as error:
            raise DataError(
                f"{self.name!r} cannot be read: {error.strerror}", fix="restore the file"
            ) from error
        return (
            file if self.num_bytes is None else io.BufferedReader(_Window(file, self.offset, self.num_bytes))
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Window(io.RawIOBase):
    """A part of a file as a file of its own: a member of a tar is never extracted."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def content_digest(item: MediaItem) -> str:
    """sha256 of the medium's bytes."""
    digest = hashlib.sha256()
    with item.open() as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class Skip:
    """Something that the listing names and that is no sample."""

    name: str
    reason: str
    kind: str = UNLISTED


@dataclass
class Listing:
    """What a source lists. `missing_caption`, `skip` or `empty`: what becomes of a medium without one."""

    items: list[MediaItem] = field(default_factory=list)
    skipped: list[Skip] = field(default_factory=list)
    missing_caption: str = "skip"

    def add(self, item: MediaItem, expected_caption: str) -> None:
        """Args: expected_caption: where the caption was looked for."""
        caption = " ".join(item.caption.split())
        if not caption and self.missing_caption == "skip":
            self.skip(item.name, f"no caption ({expected_caption})")
        else:
            self.items.append(replace(item, caption=caption))

    def skip(self, name: str, reason: str, kind: str = UNLISTED) -> None:
        self.skipped.append(Skip(name, reason, kind))

    def checked(self, sources: Iterable[str]) -> Listing:
        """The same, in the order of keys; a key that comes again is skipped.

        Raises:
            DataError: nothing is left, saying what there was instead.
        """
        first: dict[str, MediaItem] = {}
        for item in self.items:
            if item.key in first:
                self.skip(item.name, f"listed twice as {item.key!r}")
            first.setdefault(item.key, item)
        self.items = sorted(first.values(), key=lambda item: item.key)
        if not self.items:
            reasons = sorted({skip.reason for skip in self.skipped})
            raise DataError(
                f"{', '.join(sources)}: no image or video with a caption was found"
                + (
                    f"; {len(self.skipped)} entries were left out: {'; '.join(reasons[:8])}"
                    if reasons
                    else ""
                ),
                fix="give media with captions beside them (a.mp4 and a.txt), a table, or tars of such pairs",
            )
        return self
