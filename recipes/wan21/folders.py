"""Folders of media with captions beside them, and the choice of reader for any source."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.captions import CAPTION_SUFFIXES, read_caption
from zellige_lightning.recipes.wan21.containers import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from zellige_lightning.recipes.wan21.manifest import Listing, MediaItem
from zellige_lightning.recipes.wan21.tables import SUFFIXES as TABLE_SUFFIXES, Columns, list_table
from zellige_lightning.recipes.wan21.webdataset import list_tar


def collect(
    sources: Iterable[Path],
    *,
    columns: Columns | None = None,
    media_root: Path | None = None,
    missing_caption: str = "skip",
) -> Listing:
    """Everything that the sources list.

    Args:
        sources: folders, tables (.csv, .json, .jsonl, .parquet) or webdataset tars.
        columns: of the tables; None finds the preset that fits.
        media_root: what paths in tables are relative to; default, the folder of the table.
        missing_caption: `skip` leaves a medium without caption out, `empty` gives it an empty one.

    Raises:
        ConfigError: an unknown way with missing captions. DataError: a source that does not exist or cannot
            be understood, or sources that list no sample.
    """
    if missing_caption not in ("skip", "empty"):
        raise ConfigError(f"missing caption: {missing_caption!r}", fix="use `skip` or `empty`")
    sources = list(sources)
    listing = Listing(missing_caption=missing_caption)
    for source in sources:
        if source.is_dir():
            list_folder(source, listing)
        elif not source.is_file():
            raise DataError(f"source {source.name!r} does not exist", fix="correct the path")
        elif source.suffix.lower() in TABLE_SUFFIXES:
            list_table(source, listing, columns, media_root or source.parent)
        elif source.suffix.lower() == ".tar":
            list_tar(source, source.stem, listing)
        else:
            raise DataError(
                f"source {source.name!r} is neither a folder nor a table nor a tar",
                fix="give a folder, .csv, .json, .jsonl, .parquet or an uncompressed .tar",
            )
    return listing.checked(source.name for source in sources)


def list_folder(folder: Path, listing: Listing) -> None:
    """All media below `folder`, by path; hidden files and folders are not looked at."""
    captions: set[Path] = set()
    others: list[Path] = []
    for path in _files(folder):
        suffix, name = path.suffix.lower(), path.relative_to(folder).as_posix()
        if suffix in IMAGE_SUFFIXES | VIDEO_SUFFIXES:
            sidecar = next((c for s in CAPTION_SUFFIXES if (c := path.with_suffix(s)).is_file()), None)
            caption = read_caption(sidecar, listing) if sidecar else ""
            captions |= {sidecar} if sidecar else set()
            listing.add(MediaItem(name, str(path), caption, name), f"expected {path.stem}.txt or .json")
        elif suffix == ".tar":
            list_tar(path, name.removesuffix(path.suffix), listing)
        else:
            others.append(path)
    for path in others:
        if path not in captions:
            what = (
                "no medium of that name"
                if path.suffix.lower() in CAPTION_SUFFIXES
                else "no medium by its suffix"
            )
            listing.skip(path.relative_to(folder).as_posix(), what)


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent) / name for name in sorted(names) if not name.startswith("."))
