"""Packed segments and the contract of attention kernels.

Shapes: Tq, Tk = packed query and key tokens; H = heads; D = head dim. `q [Tq, H, D]`, `k`, `v [Tk, H, D]`,
`out [Tq, H, D]` in the dtype of q, `lse [Tq, H]` in fp32 (fp64 for fp64 inputs). Query segment i attends key
segment i and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes that kernels on GPUs load at once


class PackedLengths:
    """Segment lengths on the host, and their int32 prefix sums on a device, uploaded once."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.total = sum(lengths)
        self.longest = max(lengths, default=0)
        self._cumulative: dict[torch.device, Tensor] = {}

    def cumulative(self, device: torch.device) -> Tensor:
        """`[len(lengths) + 1]` int32."""
        if device not in self._cumulative:
            sums = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
            self._cumulative[device] = sums.to(device, non_blocking=True)
        return self._cumulative[device]


@dataclass(frozen=True)
class Segments:
    """What attends what: query segment i the keys of segment i, scores times `scale`."""

    queries: PackedLengths
    keys: PackedLengths
    scale: float

    def cumulative(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Prefix sums of both sides."""
        return self.queries.cumulative(device), self.keys.cumulative(device)

    @property
    def longest(self) -> tuple[int, int]:
        return self.queries.longest, self.keys.longest


def packed_lengths(lengths: Tensor) -> PackedLengths:
    """Of an int64 tensor on the host."""
    return shared_lengths(tuple(lengths.tolist()))


@lru_cache(maxsize=64)
def shared_lengths(lengths: tuple[int, ...]) -> PackedLengths:
    """Layers of one step share the result, and so one upload."""
    return PackedLengths(lengths)


def joined(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Each result over all parts of a pack; the only part's own where there is one, without a copy."""
    return tuple(torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in zip(*parts, strict=True))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of all accumulators: never below fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class TensorKind:
    """What decides which kernels can run.

    Args:
        capability: of the GPU, 10 * major + minor; 0 where there is none.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    capability: int = 0


class AttentionKernel(Protocol):
    """A pair of functions behind one contract; never called with an empty segment. Results are contiguous."""

    name: str

    @staticmethod
    def lacks(kind: TensorKind) -> str:
        """Why the kernel cannot take such tensors; empty where it can."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]: ...
