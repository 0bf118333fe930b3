"""Checkpoints of sharded parameters: folders that open on any number of ranks (torch.distributed.checkpoint).

torch writes into a folder in place and loads damaged values without a word. Here a folder is written beside
its place and renamed when all is on disk, together with a list of its files and their checksums, which is
compared before anything is loaded.
"""

from __future__ import annotations

import json
import pickle
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.fabric.utilities.load import _METADATA_FILENAME as PLAIN_STATES
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from zellige_lightning.errors import DataError

CHECKSUMS = "checksums.json"
_BLOCK = 1 << 22  # bytes that are read at a time


def save_sharded(tensors: dict[str, Any], states: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint folder, whole or not at all. A collective.

    Args:
        tensors: what is sharded: parameters under `state_dict`, and the optimizers' states.
        states: everything else, which rank 0 writes.

    Raises:
        DataError: on all ranks, where one cannot write; what was at `path` before is still there.
    """
    partial = path.with_name(f".{path.name}.partial")
    _on_first(lambda: _make_empty(partial), path)
    _together(lambda: dcp.save(tensors, checkpoint_id=partial), path)
    sums = _together(lambda: {file.name: _checksum(file) for file in _own_files(partial)}, path)
    _on_first(lambda: _complete(partial, path, states, sums), path)


def verify(path: Path) -> None:
    """Compare the files of a checkpoint folder with the list written with them; each rank reads a part. A
    collective.

    Raises:
        DataError: on all ranks, naming the files that are missing or damaged.
    """
    listed = _together(lambda: _listed(path), path)[0]
    mine = sorted(listed)[_rank() :: _world_size()]
    wrong = _together(lambda: [name for name in mine if not _intact(path / name, listed[name])], path)
    if names := sorted(name for part in wrong for name in part):
        raise DataError(
            f"checkpoint {path.name!r} is damaged: {', '.join(names[:4])}" + " ..." * (len(names) > 4),
            fix="go on from an earlier checkpoint",
        )


def put_back(folder: Path) -> None:
    """Give checkpoints their names again that a job which was killed between two renames was to replace."""
    for kept in folder.glob(".*.replaced"):
        path = folder / kept.name[1:].removesuffix(".replaced")
        if not path.exists():
            with suppress(OSError):  # another rank was faster
                kept.rename(path)


def holds_shards(state: Any) -> bool:
    """Whether an entry of a checkpoint is a mapping of sharded tensors, such as a running average."""
    return isinstance(state, Mapping) and any(isinstance(value, DTensor) for value in state.values())


def is_sharded(path: Path) -> bool:
    """Whether a checkpoint is a folder of this kind."""
    return (path / PLAIN_STATES).is_file() and (path / ".metadata").is_file()


class StoredTensor:
    """A tensor in a checkpoint folder: its shape and dtype are known, its values are read by `detach`."""

    def __init__(self, name: str, entry: TensorStorageMetadata, reader: _SafeReader) -> None:
        self.shape, self.dtype = tuple(entry.size), entry.properties.dtype
        self._name, self._reader = name, reader

    def detach(self) -> Tensor:
        """The whole tensor, on the CPU."""
        values = torch.empty(self.shape, dtype=self.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
            dcp.load({self._name: values}, storage_reader=self._reader, no_dist=True)
        return values


class ShardedTensors(Mapping[str, StoredTensor]):
    """The tensors of a checkpoint folder by name. Needs no process group, and memory for one at a time.

    Args:
        entry: of the checkpoint; without any such, there is no tensor.

    Raises:
        DataError: no such folder, or one that is damaged.
    """

    def __init__(self, path: Path, entry: str = "state_dict") -> None:
        self._reader, prefix = _SafeReader(path), f"{entry}."
        try:
            described = self._reader.read_metadata().state_dict_metadata
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError) as error:
            raise DataError(
                f"checkpoint {path.name!r} cannot be read: {error}", fix="use an intact checkpoint"
            ) from error
        self._stored = {
            name.removeprefix(prefix): StoredTensor(name, kind, self._reader)
            for name, kind in described.items()
            if name.startswith(prefix) and isinstance(kind, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> StoredTensor:
        return self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


# What the description of a checkpoint consists of. Anything else in that pickle is not unpickled.
_METADATA = "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties"
_NAMES = {
    "torch.Size",
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "torch.distributed.checkpoint.filesystem._StorageInfo",
    "torch.distributed.checkpoint.filesystem._StoragePrefix",
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (*_METADATA.split(), "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")
    ),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = f"{module}.{name}"
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or found in _NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {found}, which no checkpoint needs")


class _SafeReader(dcp.FileSystemReader):
    """Reads the description without running what a forged one might name; tensors are read so by torch."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("it describes no checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _complete(partial: Path, path: Path, states: Mapping[str, Any], sums: list[dict[str, str]]) -> None:
    torch.save(dict(states), partial / PLAIN_STATES)
    of_first = {name: _checksum(partial / name) for name in (PLAIN_STATES, ".metadata")}
    listed = {name: value for part in (*sums, of_first) for name, value in part.items()}
    (partial / CHECKSUMS).write_text(json.dumps(listed, indent=1, sort_keys=True))
    replaced = path.with_name(f".{path.name}.replaced")
    _remove(replaced)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    _remove(replaced)


def _make_empty(folder: Path) -> None:
    _remove(folder)
    folder.mkdir(parents=True)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _own_files(folder: Path) -> list[Path]:
    return list(folder.glob(f"__{_rank()}_*.distcp"))


def _listed(path: Path) -> dict[str, str]:
    if not (path / CHECKSUMS).is_file():  # written by another strategy: there is nothing to compare with
        return {}
    listed = json.loads((path / CHECKSUMS).read_text())
    return {str(name): str(value) for name, value in listed.items() if Path(name).name == name}


def _intact(file: Path, expected: str) -> bool:
    return file.is_file() and _checksum(file) == expected


def _checksum(file: Path) -> str:
    with file.open("rb") as opened:
        return f"{_crc32(opened):08x}-{file.stat().st_size}"


def _crc32(file: BinaryIO) -> int:
    value = 0
    while block := file.read(_BLOCK):
        value = zlib.crc32(block, value)
    return value


# ---- all ranks succeed, or all raise ---------------------------------------------------------------------


def _together(work: Callable[[], Any], path: Path) -> list[Any]:
    """What `work` returns on every rank, by rank."""
    mine: tuple[Any, str | None] = (None, None)
    try:
        mine = work(), None
    except Exception as error:
        mine = None, f"{type(error).__name__}: {error}"
    everybody: list[Any] = [mine] * _world_size()
    if _world_size() > 1:
        dist.all_gather_object(everybody, mine)
    for rank, (_, failure) in enumerate(everybody):
        if failure is not None:
            raise DataError(
                f"rank {rank} cannot write or read checkpoint {path.name!r}: {failure}",
                fix="free some space, or choose a folder that can be written; what was there before is kept",
            )
    return [result for result, _ in everybody]


def _on_first(work: Callable[[], None], path: Path) -> None:
    _together(work if _rank() == 0 else lambda: None, path)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
