"""Captions as vectors: the interface of a text encoder, and a small one without weights.

The encoder of Wan2.1 (UMT5-XXL) fits behind the same interface: rows beyond the caption are exactly zero.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from zellige_lightning.errors import ConfigError


class TextEncoder(Protocol):
    """Caption -> `[text_len, text_dim]` float32, zero behind the last word; no caption is all zeros."""

    @property
    def text_len(self) -> int: ...

    @property
    def text_dim(self) -> int: ...

    @property
    def settings(self) -> Mapping[str, str | int]:
        """What the values depend on; part of the identity of a latent store."""
        ...

    def encode(self, caption: str) -> Tensor: ...


@dataclass(frozen=True)
class HashedTextEncoder:
    """One row per word: the sum of fixed random vectors of the word and of its letter triples, unit variance.

    Words that share triples ("bike", "bikes") get similar rows, which is all that a small demo needs. Values
    are functions of the text alone.
    """

    text_len: int = 16
    text_dim: int = 64

    def __post_init__(self) -> None:
        if min(self.text_len, self.text_dim) < 1:
            raise ConfigError(
                f"text encoder of {self.text_len} rows x {self.text_dim}", fix="both must be >= 1"
            )

    @property
    def settings(self) -> Mapping[str, str | int]:
        return {"encoder": "hashed-trigrams-1", "text_len": self.text_len, "text_dim": self.text_dim}

    def encode(self, caption: str) -> Tensor:
        """A caption longer than `text_len` words is cut."""
        out = torch.zeros(self.text_len, self.text_dim)
        words = re.findall(r"\w+", caption.lower())[: self.text_len]
        for row, word in enumerate(words):
            out[row] = _word_vector(word, self.text_dim)
        return out


@lru_cache(maxsize=4096)
def _word_vector(word: str, dim: int) -> Tensor:
    padded = f"<{word}>"
    grams = [word, *(padded[i : i + 3] for i in range(len(padded) - 2))]
    return torch.stack([_gram_vector(gram, dim) for gram in grams]).sum(0) / len(grams) ** 0.5


def _gram_vector(gram: str, dim: int) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(f"gram|{gram}".encode()).digest()[:8], "big")
    return torch.randn(dim, generator=torch.Generator().manual_seed(seed))
