"""One encoded sample: what the manifest says of it, and its tensors in a file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.placement.sequence import Grid
from zellige_lightning.recipes.wan21.patchify import TOKEN_DIM
from zellige_lightning.recipes.wan21.tensor_files import Entry, write_file

HEADER = "zellige_samples"
LATENT_DTYPE, TEXT_DTYPE = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class EncodedRow:
    """A row of the manifest.

    Args:
        grid_t, grid_y, grid_x: in tokens. text_rows: rows of the text that are stored; the others are zero.
        decision: the row of the decision table, as JSON.
        request, stamp, sha256: what was asked for and of which file; equal ones need no second encoding.
        latents_crc, text_crc: checksums of the stored bytes.
        written_ns: the later of two rows of one key counts.
    """

    key: str
    grid_t: int
    grid_y: int
    grid_x: int
    caption: str
    text_rows: int
    decision: str
    request: str
    stamp: str
    sha256: str
    latents_crc: int
    text_crc: int
    written_ns: int
    shard: str = ""

    @property
    def grid(self) -> Grid:
        return self.grid_t, self.grid_y, self.grid_x


def crc_of(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def stored_text(text: Tensor) -> Tensor:
    """`[text_len, text_dim]` -> the rows up to the last one that is not zero."""
    used = (text != 0).any(dim=1).nonzero()
    return text[: int(used[-1]) + 1 if len(used) else 0].to(TEXT_DTYPE)


def checked(key: str, grid: Grid, latents: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """The tensors as they are stored. Raises: DataError for a wrong shape or values that are not finite."""
    expected = (grid[0] * grid[1] * grid[2], TOKEN_DIM)
    if tuple(latents.shape) != expected:
        raise DataError(
            f"sample {key!r} was encoded to {tuple(latents.shape)}, its grid asks for {expected}",
            fix="use a VAE with the strides of Wan2.1",
        )
    stored = latents.to(LATENT_DTYPE), stored_text(text)
    if not all(bool(torch.isfinite(values).all()) for values in stored):
        raise DataError(
            f"sample {key!r} was encoded to values that are not finite", fix="encode with --dtype float32"
        )
    return stored


def write_samples(path: Path, rows: list[EncodedRow], fetch: Any) -> None:
    """One safetensors file of some samples. `fetch(name)` gives `latents/<key>` or `text/<key>`.

    Raises:
        DataError: the disk is full or read-only.
    """
    metadata = {HEADER: json.dumps([asdict(row) for row in rows])}
    entries = []
    for row in rows:
        num_tokens = row.grid_t * row.grid_y * row.grid_x
        text = fetch(f"text/{row.key}")
        entries.append(Entry(f"latents/{row.key}", LATENT_DTYPE, (num_tokens, TOKEN_DIM)))
        entries.append(Entry(f"text/{row.key}", TEXT_DTYPE, tuple(text.shape)))
    write_file(path, entries, fetch, metadata)


def read_rows(path: Path) -> list[EncodedRow]:
    """The rows of a file; none if it is damaged: its samples are then encoded again."""
    try:
        with safe_open(path, framework="pt") as file:
            return [EncodedRow(**entry) for entry in json.loads((file.metadata() or {})[HEADER])]
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return []


def all_rows(folder: Path) -> Iterator[tuple[Path, EncodedRow]]:
    """Every sample in every file of a folder."""
    for path in sorted(folder.glob("*.safetensors")):
        for row in read_rows(path):
            yield path, row
