"""Folders that `zellige-encode` wrote: a Parquet manifest, and token ranges as mapped slices of shards."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zellige_lightning.durable import atomically
from zellige_lightning.errors import DataError
from zellige_lightning.placement import Sequence
from zellige_lightning.recipes.wan21.encoded_row import LATENT_DTYPE, TEXT_DTYPE, EncodedRow, crc_of
from zellige_lightning.recipes.wan21.patchify import TOKEN_DIM
from zellige_lightning.recipes.wan21.store import INDEX, LatentStore, rows_of
from zellige_lightning.sources import FieldSpec, Sample

MANIFEST = "manifest.parquet"
FORMAT = 1
_META = b"zellige"
_OPEN_SHARDS = 128  # mapped at once; a large data set has more files than a process may open
_FINISH = "run zellige-encode again: it encodes what is missing"


def open_store(folder: Path | str) -> LatentStore | EncodedStore:
    """The store in a folder, whoever wrote it. Raises: DataError if there is none or it is damaged."""
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return EncodedStore(folder)
    if (folder / INDEX).is_file():
        return LatentStore(folder)
    started = (folder / "settings.json").is_file()
    raise DataError(
        f"latent store {folder.name!r} has no {INDEX} or {MANIFEST}",
        fix=_FINISH if started else "encode the data first, with zellige-encode",
    )


class EncodedStore:
    """A token source, and a map-style dataset of the samples' metadata.

    Text is stored without its zero rows and filled up when it is read.

    Raises:
        DataError: no manifest, a damaged one, or one whose shards are not all there.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        table, meta = _read_manifest(self.folder)
        self.settings: Mapping[str, Any] = meta["settings"]
        self._captions = table.column("caption")
        self._columns = {
            name: table.column(name).to_pylist() for name in ("shard", "text_rows", "latents_crc", "text_crc")
        }
        grids = zip(*(table.column(f"grid_{axis}").to_pylist() for axis in "tyx"), strict=True)
        keys = table.column("key").to_pylist()
        self.samples = tuple(Sample(key, grid) for key, grid in zip(keys, grids, strict=True))
        self._row_of = {key: row for row, key in enumerate(keys)}
        self._open: OrderedDict[str, Any] = OrderedDict()
        self.token_fields = {"latents": FieldSpec((TOKEN_DIM,), LATENT_DTYPE)}
        shape = int(meta["settings"]["text_len"]), int(meta["settings"]["text_dim"])
        self.sequence_fields = {"text": FieldSpec(shape, TEXT_DTYPE)}
        _check_shards(self.folder, meta["shards"])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # a worker process maps the files itself

    def caption(self, key: str) -> str:
        return str(self._captions[self._row(key)])

    def read_tokens(self, sequence: Sequence, tokens: range) -> dict[str, Tensor]:
        """Only the rows asked for are read from disk."""
        rows = self._slice("latents", sequence.key)
        return {"latents": rows_of(rows, sequence, tokens, fix="use the shapes of the store")}

    def read_sequence(self, sequence: Sequence) -> dict[str, Tensor]:
        text = torch.zeros(self.sequence_fields["text"].shape, dtype=TEXT_DTYPE)
        if count := self._columns["text_rows"][self._row(sequence.key)]:
            text[:count] = self._slice("text", sequence.key)[:]
        return {"text": text}

    def verify(self) -> None:
        """Compare everything with its checksums. Raises: DataError naming the first damaged sample."""
        for row, sample in enumerate(self.samples):
            for kind in ("latents", "text"):
                if crc_of(self._slice(kind, sample.key)[:]) != self._columns[f"{kind}_crc"][row]:
                    raise DataError(
                        f"{kind} of sample {sample.key!r} in {self._columns['shard'][row]!r} are corrupt",
                        fix=f"delete that file and {_FINISH}",
                    )

    def _row(self, key: str) -> int:
        if key not in self._row_of:
            raise DataError(f"{self.folder.name!r} has no sample {key!r}", fix="use the keys of its manifest")
        return self._row_of[key]

    def _slice(self, kind: str, key: str) -> Any:
        name = self._columns["shard"][self._row(key)]
        try:
            if name not in self._open:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            self._open.move_to_end(name)
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
            return self._open[name].get_slice(f"{kind}/{key}")
        except (OSError, SafetensorError) as error:
            raise DataError(f"{name!r} cannot be read for sample {key!r}: {error}", fix=_FINISH) from error


def write_manifest(folder: Path, settings: Mapping[str, Any], rows: list[EncodedRow]) -> None:
    """Write the manifest whole or not at all. Raises: DataError if the disk refuses."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    shards = {name: (folder / name).stat().st_size for name in sorted({row.shard for row in rows})}
    meta = {"format": FORMAT, "settings": dict(settings), "shards": shards}
    kinds = {"int": pa.int64(), "str": pa.string()}
    schema = pa.schema([(f.name, kinds[str(f.type)]) for f in fields(EncodedRow)])
    columns = {f.name: [getattr(row, f.name) for row in rows] for f in fields(EncodedRow)}
    table = pa.table(columns, schema=schema.with_metadata({_META: json.dumps(meta).encode()}))
    atomically(folder / MANIFEST, lambda file: pq.write_table(table, file))


def _read_manifest(folder: Path) -> tuple[Any, dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(folder / MANIFEST)
        meta = json.loads((table.schema.metadata or {})[_META])
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']!r}, not {FORMAT}")
        if missing := {f.name for f in fields(EncodedRow)} - set(table.column_names):
            raise ValueError(f"no columns {sorted(missing)}")
        if any(Path(name).name != name for name in meta["shards"]) or not table.num_rows:
            raise ValueError("a shard outside of the folder, or no sample")
        meta["settings"]["text_len"], meta["settings"]["text_dim"]
    except FileNotFoundError as error:
        raise DataError(
            f"{folder.name!r} has no {MANIFEST}", fix=f"encode the data first, or {_FINISH}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{MANIFEST} of {folder.name!r} is damaged: {error}", fix=_FINISH) from error
    return table, meta


def _check_shards(folder: Path, shards: Mapping[str, int]) -> None:
    for name, num_bytes in shards.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != num_bytes:
            state = "is missing" if found is None else f"has {found} bytes instead of {num_bytes}"
            raise DataError(f"{name!r} of {folder.name!r} {state}", fix=_FINISH)


def identity(store: LatentStore | EncodedStore) -> dict[str, Any]:
    """What latents and text of a store mean: the settings of its VAE and text encoder."""
    return {name: value for name, value in sorted(store.settings.items()) if name in _MEANING}


_MEANING = (
    *("codec", "vae_weights", "vae_dtype"),
    *("encoder", "encoder_weights", "encoder_dtype", "text_len", "text_dim"),
)
