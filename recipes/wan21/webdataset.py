"""Webdataset tars, read as streams: headers are walked, media stay where they are, nothing is extracted.

A tar may come from anywhere. A member that points outside, a link or a device makes the whole tar unusable;
no size that a header claims is allocated before it is compared with a cap and with the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.captions import CAPTION_SUFFIXES, MAX_CAPTION_BYTES, caption_from
from zellige_lightning.recipes.wan21.containers import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from zellige_lightning.recipes.wan21.manifest import Listing, MediaItem

MAX_MEMBERS = 1_000_000
_MAX_NAME_BYTES = 1 << 16
_BLOCK = 512
_REGULAR, _FOLDER, _LONG_NAME, _PAX, _PAX_GLOBAL = (b"0", b"\0"), b"5", b"L", b"x", b"g"


@dataclass(frozen=True)
class Member:
    """A regular file in a tar: where its bytes are."""

    name: str
    offset: int
    num_bytes: int

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix.lower()

    @property
    def stem(self) -> str:
        """What a medium and its caption share."""
        return self.name[: len(self.name) - len(self.suffix)]


def list_tar(path: Path, prefix: str, listing: Listing) -> None:
    """Add the samples of a tar: media and captions of equal stem.

    Args:
        prefix: of the keys, so that equal names in several tars differ.

    Raises:
        DataError: compressed, damaged or cut short; an unsafe member; two members of one name; too many.
    """
    media: dict[str, Member] = {}
    captions: dict[str, Member] = {}
    with path.open("rb") as file:
        for member in members(file, path):
            if member.suffix in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
                _put(media, member, path)
            elif member.suffix in CAPTION_SUFFIXES:
                _put(captions, member, path, prefer=".txt")
            else:
                listing.skip(f"{prefix}/{member.name}", "no medium by its suffix")
        for stem, member in media.items():
            caption = _caption(file, captions.pop(stem, None))
            name = f"{prefix}/{member.name}"
            item = MediaItem(name, str(path), caption, name, member.offset, member.num_bytes)
            listing.add(item, f"expected {stem}.txt or .json in the tar")
    for member in captions.values():
        listing.skip(f"{prefix}/{member.name}", "no medium of that name")


def _put(members_by_stem: dict[str, Member], member: Member, path: Path, prefer: str = "") -> None:
    other = members_by_stem.get(member.stem)
    if other is None or (prefer == member.suffix and other.suffix != prefer):
        members_by_stem[member.stem] = member
    elif other.suffix == member.suffix or not prefer:
        raise DataError(
            f"tar {path.name!r} has {other.name!r} and {member.name!r}: one sample has one medium",
            fix="give each sample a key of its own and write the tar again",
        )


def _caption(file: IO[bytes], member: Member | None) -> str:
    if member is None or member.num_bytes > MAX_CAPTION_BYTES:
        return ""
    file.seek(member.offset)
    return caption_from(member.suffix, file.read(member.num_bytes))


def members(file: IO[bytes], path: Path) -> Iterator[Member]:
    """The regular files of a tar, in order. Raises: DataError, see `list_tar`."""
    end = path.stat().st_size
    position, count, long_name = 0, 0, ""
    while True:
        file.seek(position)
        header = file.read(_BLOCK)
        if not header.strip(b"\0"):
            return  # the end: zero blocks, or nothing more
        kind, name, size = _parse(header, path)
        data = position + _BLOCK
        position = data + -(-size // _BLOCK) * _BLOCK
        if data + size > end:
            raise DataError(f"tar {path.name!r} is cut short at {name!r}", fix="copy or download it again")
        if kind in (_LONG_NAME, _PAX, _PAX_GLOBAL):
            if size > _MAX_NAME_BYTES:
                raise DataError(f"tar {path.name!r} has a name of {size} bytes", fix="write the tar again")
            extra = file.read(size)
            long_name = extra.rstrip(b"\0").decode() if kind == _LONG_NAME else _pax_path(extra) or long_name
            continue
        name, long_name = long_name or name, ""
        _check_safe(name, kind, path)
        count += 1
        if count > MAX_MEMBERS:
            raise DataError(f"tar {path.name!r} has more than {MAX_MEMBERS} members", fix="split the tar")
        if kind in _REGULAR and not PurePosixPath(name).name.startswith("."):
            yield Member(name.removeprefix("./"), data, size)


def _parse(header: bytes, path: Path) -> tuple[bytes, str, int]:
    """(type, name, size) of a header block."""
    try:
        checksum = sum(header[:148]) + 8 * 32 + sum(header[156:])
        if len(header) < _BLOCK or int(header[148:156].strip(b" \0") or b"-1", 8) != checksum:
            raise ValueError("its checksum is wrong")
        if header[124] & 0x80:  # sizes of 8 GiB and more are binary
            size = int.from_bytes(header[125:136], "big")
        else:
            size = int(header[124:136].strip(b" \0") or b"0", 8)
        name = header[:100].split(b"\0")[0].decode()
        if header[257:263] == b"ustar\0" and (folder := header[345:500].split(b"\0")[0].decode()):
            name = f"{folder}/{name}"
    except ValueError as error:
        raise DataError(
            f"{path.name!r} is no intact tar: {error}", fix="give an uncompressed tar, or download it again"
        ) from error
    return header[156:157], name, size


def _pax_path(records: bytes) -> str:
    """The name in extended headers: lines of `length key=value`."""
    while records:
        length = records.split(b" ", 1)[0]
        if not length.isdigit() or not 0 < int(length) <= len(records):
            return ""
        key, _, value = records[len(length) + 1 : int(length) - 1].partition(b"=")
        if key == b"path":
            return value.decode(errors="replace")
        records = records[int(length) :]
    return ""


def _check_safe(name: str, kind: bytes, path: Path) -> None:
    parts = PurePosixPath(name).parts
    problem = (
        "an absolute path" if name.startswith("/") else "a path that leaves the folder" * (".." in parts)
    )
    if kind not in (*_REGULAR, _FOLDER):
        problem = "a link, device or sparse file"
    if problem:
        raise DataError(
            f"tar {path.name!r} has the member {name!r}, {problem}: it is not used at all",
            fix="write a tar of plain files with relative names",
        )
