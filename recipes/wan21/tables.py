"""Tables that list media: CSV, JSON, JSONL and Parquet, with the columns of well-known data sets."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.containers import VIDEO_SUFFIXES
from zellige_lightning.recipes.wan21.manifest import MISSING, Listing, MediaItem

SUFFIXES = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Columns:
    """Where a table says what.

    Args:
        media: columns that may hold the file's name; the first that is not empty counts.
        caption: column of the caption.
        time_range: column of (start, end) within a video, if there is one.
        url: column of the address that a clip was cut from, if there is one.
        anywhere: the name is looked for in all folders below the media root, not only in it.
    """

    media: tuple[str, ...]
    caption: str
    time_range: str | None = None
    url: str | None = None
    anywhere: bool = False

    def missing(self, found: set[str]) -> list[str]:
        """Columns that a table lacks."""
        wanted = [self.caption, *(name for name in (self.time_range, self.url) if name)]
        lacking = [name for name in wanted if name not in found]
        return lacking if found & set(self.media) else [" or ".join(self.media), *lacking]


PRESETS: Mapping[str, Columns] = {
    "openvid": Columns(("video",), "caption", anywhere=True),
    "koala36m": Columns(("videoID",), "caption", time_range="timestamp", url="url", anywhere=True),
    "diffsynth": Columns(("video", "image"), "prompt"),
    "opensora": Columns(("path",), "text"),
    "videox": Columns(("file_path",), "text"),
}


def preset(name: str) -> Columns:
    """Raises `ConfigError`, naming the presets that there are."""
    if name not in PRESETS:
        raise ConfigError(
            f"no preset of columns is called {name!r}", fix=f"choose one of {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def list_table(path: Path, listing: Listing, columns: Columns | None, media_root: Path) -> None:
    """Add every row of a table.

    Args:
        columns: None takes the preset whose columns the table has.

    Raises:
        DataError: the table cannot be parsed, or has other columns; they are listed.
    """
    files = _Files(media_root)
    for number, row in enumerate(_rows(path), start=1):
        columns = columns or _fitting_preset(path, set(row))
        if lacking := columns.missing(set(row)):
            raise DataError(
                f"table {path.name!r} has no column {', '.join(map(repr, lacking))}; it has"
                f" {', '.join(map(repr, row))} (row {number})",
                fix="choose the preset of this data set, or name the columns with --media-column and"
                " --caption-column",
            )
        _add_row(listing, row, columns, files, f"{path.name}, row {number}")


def _fitting_preset(path: Path, found: set[str]) -> Columns:
    fitting = [columns for columns in PRESETS.values() if not columns.missing(found)]
    if not fitting:
        raise DataError(
            f"table {path.name!r} fits no preset of columns; it has {', '.join(map(repr, sorted(found)))}",
            fix="name the columns with --media-column and --caption-column",
        )
    return fitting[0]


def _add_row(listing: Listing, row: Row, columns: Columns, files: _Files, where: str) -> None:
    name = next((str(row[column]) for column in columns.media if row.get(column)), "")
    if not name:
        listing.skip(where, "no name of a file in the row")
        return
    if "://" in name:
        listing.skip(name, "an address, not a file: download it first")
        return
    start_s, end_s = 0.0, None
    try:
        path = files.find(name, anywhere=columns.anywhere)
        if path is None and columns.url and (video := _video_of(str(row.get(columns.url) or ""))):
            path = files.find(video, anywhere=True)  # the whole video, from which the clip is cut here
            start_s, end_s = _time_range(row.get(columns.time_range or ""))
    except LookupError as error:
        listing.skip(name, str(error))
        return
    if path is None:
        listing.skip(name, "the file does not exist below the media root", MISSING)
        return
    cut = f"@{start_s:.3f}-{end_s:.3f}" if end_s is not None else ""
    item = MediaItem(
        name + cut, str(path), str(row.get(columns.caption) or ""), path.name, 0, None, start_s, end_s
    )
    listing.add(item, f"column {columns.caption!r} of {where} is empty")


class _Files:
    """Media below a folder, by path or by name."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def _by_name(self) -> dict[str, list[Path]]:
        """Built once, only where names are looked for anywhere: a million rows must not scan it again."""
        found: dict[str, list[Path]] = {}
        for parent, _, names in os.walk(self.root):
            for name in names:
                path = Path(parent) / name
                found.setdefault(name, []).append(path)
                if path.suffix.lower() in VIDEO_SUFFIXES:
                    found.setdefault(path.stem, []).append(path)
        return found

    def find(self, name: str, *, anywhere: bool) -> Path | None:
        """None if it is not there. Raises: LookupError if several files have the name."""
        path = self.root / name
        if path.is_file():
            return path
        found = self._by_name.get(name, []) if anywhere else []
        if len(found) > 1:
            raise LookupError(f"{len(found)} files below the media root have this name")
        return found[0] if found else None


def _video_of(url: str) -> str:
    """The id of a YouTube address: names of downloaded videos."""
    parts = urlsplit(url)
    return parse_qs(parts.query).get("v", [parts.path.rsplit("/", 1)[-1]])[0]


def _time_range(value: Any) -> tuple[float, float]:
    """Seconds from two times such as ['0:00:06.967', '0:00:12.667'] or [6.9, 12.6]. Raises: LookupError."""
    times = re.findall(r"(?:(\d+):)?(?:(\d+):)?(\d+(?:\.\d+)?)", str(value))
    seconds = [float(s) + 60 * float(m or 0) + 3600 * float(h or 0) for h, m, s in map(_hms, times)]
    if len(seconds) != 2 or seconds[0] >= seconds[1]:
        raise LookupError(f"the time range {value!r} is no start and end")
    return seconds[0], seconds[1]


def _hms(parts: tuple[str, str, str]) -> tuple[str, str, str]:
    """With one colon the first number is minutes."""
    first, second, last = parts
    return (first, second, last) if second else ("", first, last)


def _rows(path: Path) -> Iterator[Row]:
    reader = {".csv": _csv, ".tsv": _csv, ".json": _json, ".jsonl": _jsonl, ".parquet": _parquet}
    try:
        yield from reader[path.suffix.lower()](path)
    except (ValueError, csv.Error, OSError) as error:
        raise DataError(f"table {path.name!r} cannot be read: {error}", fix="repair the file") from error


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(1 << 24)  # captions can be long, a damaged quote must not take all memory
    with path.open(newline="", encoding="utf-8-sig") as file:
        yield from csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")


def _json(path: Path) -> Iterator[Row]:
    rows = json.loads(path.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("it is no list of objects")
    yield from rows


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"line {number} is no object")
                yield row


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=4096):
            yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise ValueError(str(error)) from error
