"""Encoded samples on disk: safetensors shards and a JSON index, read as memory-mapped slices.

A folder holds `index.json` and `shard-00000.safetensors`, ... (see encode.py, which writes them). Tensors are
stored patchified, `[L, 64]` per sample, so that a token range is a range of rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence as Rows
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.placement import Sequence
from zellige_lightning.placement.sequence import Grid
from zellige_lightning.sources import FieldSpec, Sample

INDEX = "index.json"
FORMAT = 1
ENCODE_AGAIN = "delete the folder and encode again"

Settings = Mapping[str, Any]


def settings_digest(settings: Settings, samples: Rows[Sample]) -> str:
    """Identity of a store: what was asked for, sample by sample."""
    text = json.dumps([FORMAT, dict(settings), [[s.key, list(s.grid)] for s in samples]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class LatentStore:
    """A token source over a folder written by `build_store`; also a map-style dataset of their metadata.

    Args:
        folder: where the index is.
        settings: if given, those that the store must have been built with.

    Raises:
        DataError: no index, an index that is damaged or of other settings, a shard missing or cut short.
    """

    def __init__(self, folder: Path | str, settings: Settings | None = None) -> None:
        self.folder = Path(folder)
        self._index = _read_index(self.folder)
        if settings is not None:
            _compare(self.folder, self._index["settings"], settings)
        self._shard_of: dict[str, str] = {}
        self._captions: dict[str, str] = {}
        samples = []
        for shard in self._index["shards"]:
            _check_size(self.folder / shard["file"], shard["bytes"])
            for row in shard["samples"]:
                samples.append(Sample(row["key"], _grid(row["grid"])))
                self._shard_of[row["key"]], self._captions[row["key"]] = shard["file"], row["caption"]
        self.samples: tuple[Sample, ...] = tuple(samples)
        self._open: dict[str, Any] = {}
        latents, text = (self._slice(kind, samples[0].key) for kind in ("latents", "text"))
        self.token_fields = {"latents": FieldSpec(tuple(latents.get_shape()[1:]), latents[:0].dtype)}
        self.sequence_fields = {"text": FieldSpec(tuple(text.get_shape()), text[:0].dtype)}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # a worker process maps the files itself

    @property
    def settings(self) -> Settings:
        """What it was built with."""
        return dict(self._index["settings"])

    def caption(self, key: str) -> str:
        return self._captions[key]

    def read_tokens(self, sequence: Sequence, tokens: range) -> dict[str, Tensor]:
        """Only the rows asked for are read from disk."""
        return {"latents": rows_of(self._slice("latents", sequence.key), sequence, tokens, ENCODE_AGAIN)}

    def read_sequence(self, sequence: Sequence) -> dict[str, Tensor]:
        return {"text": self._slice("text", sequence.key)[:]}

    def verify(self, digest: str | None = None) -> None:
        """Compare every shard with its checksum, and the identity with `digest`. Raises `DataError`."""
        if digest is not None and self._index["digest"] != digest:
            raise DataError(
                f"latent store {self.folder.name!r} was encoded from other samples", fix=ENCODE_AGAIN
            )
        for shard in self._index["shards"]:
            if sha256_of(self.folder / shard["file"]) != shard["sha256"]:
                raise DataError(
                    f"shard {shard['file']!r} of latent store {self.folder.name!r} is corrupt",
                    fix=ENCODE_AGAIN,
                )

    def _slice(self, kind: str, key: str) -> Any:
        if key not in self._shard_of:
            raise DataError(
                f"latent store {self.folder.name!r} has no sample {key!r}", fix="use the keys of its index"
            )
        name = self._shard_of[key]
        try:
            if name not in self._open:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            return self._open[name].get_slice(f"{kind}/{key}")
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"shard {name!r} cannot be read for sample {key!r}: {error}", fix=ENCODE_AGAIN
            ) from error


def rows_of(rows: Any, sequence: Sequence, tokens: range, fix: str) -> Tensor:
    """Those of a token range, which alone are read from disk.

    Args:
        rows: a sample's, as a slice of an open file.

    Raises:
        DataError: the sample does not have the length of its bucket.
    """
    if (stored := rows.get_shape()[0]) != sequence.num_tokens:
        raise DataError(
            f"sample {sequence.key!r} has {stored} rows, its bucket {sequence.bucket.grid} asks for"
            f" {sequence.num_tokens}",
            fix=fix,
        )
    found: Tensor = rows[tokens.start : tokens.stop]
    return found


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / INDEX).read_text())
        for shard in index["shards"]:
            if Path(shard["file"]).name != shard["file"]:
                raise ValueError(f"shard name {shard['file']!r} leaves the folder")
            shard["bytes"], shard["sha256"], shard["samples"][0]["key"]
        index["digest"], dict(index["settings"]), index["shards"][0]
    except FileNotFoundError as error:
        raise DataError(
            f"latent store {folder.name!r} has no {INDEX}", fix="encode the data first"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"the index of latent store {folder.name!r} is damaged: {error!r}", fix=ENCODE_AGAIN
        ) from error
    if index.get("format") != FORMAT:
        raise DataError(
            f"latent store {folder.name!r} has format {index.get('format')!r}, not {FORMAT}", fix=ENCODE_AGAIN
        )
    return dict(index)


def _compare(folder: Path, stored: Settings, wanted: Settings) -> None:
    normal = json.loads(json.dumps(dict(wanted)))
    different = sorted(k for k in {*stored, *normal} if stored.get(k) != normal.get(k))
    if different:
        text = ", ".join(f"{k}: {stored.get(k)!r} stored, {normal.get(k)!r} wanted" for k in different)
        raise DataError(
            f"latent store {folder.name!r} has other settings ({text})",
            fix="use another folder, or " + ENCODE_AGAIN,
        )


def _check_size(path: Path, num_bytes: int) -> None:
    size = path.stat().st_size if path.is_file() else None
    if size != num_bytes:
        found = "is missing" if size is None else f"has {size} bytes instead of {num_bytes}"
        raise DataError(f"shard {path.name!r} of latent store {path.parent.name!r} {found}", fix=ENCODE_AGAIN)


def _grid(values: Any) -> Grid:
    frames, rows, columns = (int(v) for v in values)
    return frames, rows, columns
