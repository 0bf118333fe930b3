"""The interface between stored samples and planned batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Rows
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from zellige_lightning.placement import Sequence
from zellige_lightning.placement.sequence import Grid


@dataclass(frozen=True)
class FieldSpec:
    """Shape behind the leading axis (tokens or sequences) and dtype of a field."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Sample:
    """Metadata of one image or video. `grid` is (T, H, W) in tokens; `key` names it for ever."""

    key: str
    grid: Grid


@runtime_checkable
class TokenSource(Protocol):
    """Reads token ranges of samples. Called from a background thread; one call at a time.

    `token_fields` describe tensors with one row per token, `sequence_fields` tensors with one row per
    sequence (a text embedding). Readers raise `DataError` for whatever they cannot deliver exactly.
    """

    @property
    def samples(self) -> Rows[Sample]: ...

    @property
    def token_fields(self) -> Mapping[str, FieldSpec]: ...

    @property
    def sequence_fields(self) -> Mapping[str, FieldSpec]: ...

    def read_tokens(self, sequence: Sequence, tokens: range) -> dict[str, Tensor]:
        """Each field for that token range: `[len(tokens), *shape]`."""
        ...

    def read_sequence(self, sequence: Sequence) -> dict[str, Tensor]:
        """Each per-sequence field: `[*shape]`."""
        ...
