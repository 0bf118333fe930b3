"""Safetensors on disk: names and tensors of one or many files, and a writer that holds one tensor at a time.

safetensors' own `save_file` wants all tensors of a file in memory at once; a model of 14B parameters in fp32
is 57 GB. The format is simple: the length of a JSON header, the header, the bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zellige_lightning.durable import atomically
from zellige_lightning.errors import DataError

STEM = "diffusion_pytorch_model"  # of the files' names, in both layouts
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


class TensorFiles:
    """The tensors of a safetensors file, or of all safetensors files in a folder. A context manager.

    Args:
        path: a file, or a folder (`transformer/` inside it is taken if it has no such file itself).

    Raises:
        DataError: nothing there, a shard of the index missing, a damaged file, or a name in two files.
    """

    def __init__(self, path: Path | str) -> None:
        self.folder, self.files = _find(Path(path))
        self._file_of: dict[str, Any] = {}
        self._open: list[Any] = []
        for file in self.files:
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise DataError(
                    f"weights {file.name!r} cannot be read: {error}", fix="copy or download the file again"
                ) from error
            self._open.append(handle)
            names = list(handle.keys())
            if double := set(names) & set(self._file_of):
                raise DataError(
                    f"tensor {min(double)!r} is in two files of {self.folder.name!r}",
                    fix="keep the files of one model in a folder of their own",
                )
            self._file_of |= dict.fromkeys(names, handle)

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file_of.clear()
        self._open.clear()

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor, or only its `part`, which is then all that is read from disk."""
        if part is None or not part:
            tensor: Tensor = self._file_of[name].get_tensor(name)
            return tensor
        rows: Tensor = self._file_of[name].get_slice(name)[part]
        return rows


def _find(path: Path) -> tuple[Path, list[Path]]:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise DataError(
                f"weights {path.name!r} are no safetensors file",
                fix="convert pickled weights to safetensors first",
            )
        return path.parent, [path]
    for folder in (path, path / "transformer"):
        if files := sorted(folder.glob("*.safetensors")):
            _check_complete(folder, files)
            return folder, files
    raise DataError(
        f"{path.name!r} holds no safetensors file", fix="give the folder of the transformer's weights"
    )


def _check_complete(folder: Path, files: list[Path]) -> None:
    """Every file that an index names must be there."""
    for index in folder.glob("*.safetensors.index.json"):
        wanted = set(json.loads(index.read_text())["weight_map"].values())
        if missing := wanted - {file.name for file in files}:
            raise DataError(
                f"weights in {folder.name!r} lack {sorted(missing)}", fix="copy the missing files"
            )


@dataclass(frozen=True)
class Entry:
    """A tensor to be written: its name, type and shape are known before its values are fetched."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_sharded(
    folder: Path, entries: Iterable[Entry], fetch: Callable[[str], Tensor], max_shard_bytes: int
) -> list[Path]:
    """Write `entries` into one or several files as diffusers names them, with an index if there are several.

    Raises:
        DataError: the disk is full or read-only; files of an earlier export stay as they were.
    """
    shards: list[list[Entry]] = [[]]
    for entry in entries:
        if shards[-1] and sum(e.num_bytes for e in shards[-1]) + entry.num_bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    count = len(shards)
    names = [f"{STEM}-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    paths = [folder / name for name in (names if count > 1 else [f"{STEM}.safetensors"])]
    for path, shard in zip(paths, shards, strict=True):
        write_file(path, shard, fetch)
    if count > 1:
        weight_map = {
            entry.name: path.name for path, shard in zip(paths, shards, strict=True) for entry in shard
        }
        total = sum(entry.num_bytes for shard in shards for entry in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_text(folder / f"{STEM}.safetensors.index.json", json.dumps(index, indent=2))
    return paths


def write_file(
    path: Path,
    entries: Iterable[Entry],
    fetch: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """One safetensors file, written beside its place and then renamed. `metadata` goes into its header."""
    entries = list(entries)

    def write(file: BinaryIO) -> None:
        file.write(_header(entries, metadata or {}))
        for entry in entries:
            values = fetch(entry.name).detach().to("cpu", entry.dtype).contiguous()
            if tuple(values.shape) != entry.shape:
                raise DataError(f"tensor {entry.name!r} has shape {tuple(values.shape)}, not {entry.shape}")
            file.write(values.view(-1).view(torch.uint8).numpy())

    atomically(path, write)


def write_text(path: Path, text: str) -> None:
    atomically(path, lambda file: file.write(text.encode()))


def check_writable(folder: Path) -> None:
    """Raises `DataError` if nothing can be written there."""
    probe = folder / ".writable"
    write_text(probe, "")
    probe.unlink(missing_ok=True)


def _header(entries: list[Entry], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for entry in entries:
        end = start + entry.num_bytes
        table[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
