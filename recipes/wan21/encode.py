"""Writes latent stores: encodes what is missing, atomically and restartably.

Every file is written beside its place and then renamed, the index last: a folder with an index is complete.
Interrupted encoding goes on with the first missing shard. Two processes that want the same store take turns,
and the second finds it complete.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence as Rows
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.patchify import TOKEN_DIM
from zellige_lightning.recipes.wan21.store import (
    FORMAT,
    INDEX,
    LatentStore,
    Settings,
    settings_digest,
    sha256_of,
)
from zellige_lightning.sources import Sample

# One entry, since safetensors writes several in no fixed order: equal samples give equal bytes.
_HEADER = "latent_shard"


@dataclass(frozen=True)
class Encoded:
    """One sample as the encoder returns it: latents `[L, 64]`, text `[text_len, text_dim]`, the caption."""

    latents: Tensor
    text: Tensor
    caption: str


def build_store(
    folder: Path,
    settings: Settings,
    samples: Rows[Sample],
    encode: Callable[[Sample], Encoded],
    *,
    samples_per_shard: int = 64,
) -> bool:
    """Encode what is missing; returns whether anything was. A complete store of the same settings is kept.

    Args:
        settings: all that the values depend on besides key and grid; JSON types.
        encode: called once per missing sample, in order.

    Raises:
        DataError: the folder holds a store of other settings, or damaged files; or the samples are unusable.
    """
    if not samples or len({s.key for s in samples}) != len(samples):
        raise DataError(
            "the samples to encode are none, or share keys", fix="give every sample a key of its own"
        )
    digest = settings_digest(settings, samples)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one(folder):
        if (folder / INDEX).exists():
            LatentStore(folder, settings).verify(digest)
            return False
        shards = []
        for start in range(0, len(samples), samples_per_shard):
            path = folder / f"shard-{start // samples_per_shard:05d}.safetensors"
            shards.append(_shard(path, digest, samples[start : start + samples_per_shard], encode))
        index = {"format": FORMAT, "digest": digest, "settings": dict(settings), "shards": shards}
        _replace(folder / INDEX, lambda path: path.write_text(json.dumps(index, indent=1)))
    return True


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Wait until no other process writes in the folder. The lock ends with its process: never stale."""
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _shard(
    path: Path, digest: str, samples: Rows[Sample], encode: Callable[[Sample], Encoded]
) -> dict[str, Any]:
    """Index entry of a shard, which is encoded unless an earlier, interrupted run has left it whole."""
    captions = _captions_of(path, digest)
    if captions is None:
        encoded = [(sample, _checked(sample, encode(sample))) for sample in samples]
        captions = {sample.key: item.caption for sample, item in encoded}
        tensors = {f"latents/{s.key}": item.latents.contiguous() for s, item in encoded}
        tensors |= {f"text/{s.key}": item.text.contiguous() for s, item in encoded}
        metadata = {_HEADER: json.dumps({"digest": digest, "captions": captions})}
        _replace(path, lambda temporary: save_file(tensors, temporary, metadata))
    rows = [{"key": s.key, "grid": list(s.grid), "caption": captions[s.key]} for s in samples]
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path), "samples": rows}


def _captions_of(path: Path, digest: str) -> dict[str, str] | None:
    """Captions in a shard left by an interrupted run of the same settings; None if it must be encoded."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})[_HEADER])
            return dict(header["captions"]) if header["digest"] == digest else None
    except (FileNotFoundError, SafetensorError, KeyError, ValueError):
        return None


def _checked(sample: Sample, item: Encoded) -> Encoded:
    expected = (sample.grid[0] * sample.grid[1] * sample.grid[2], TOKEN_DIM)
    if tuple(item.latents.shape) != expected:
        raise DataError(
            f"sample {sample.key!r} was encoded to {tuple(item.latents.shape)}, its grid {sample.grid} asks"
            f" for {expected}",
            fix="make the encoder resize to the pixel shape of the grid",
        )
    if not bool(torch.isfinite(item.latents).all() and torch.isfinite(item.text).all()):
        raise DataError(
            f"sample {sample.key!r} was encoded to values that are not finite", fix="look at the medium"
        )
    return item


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
