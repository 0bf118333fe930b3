"""Packed segments and the contract of attention kernels.

Shapes: Tq, Tk = packed query and key tokens; H = heads; D = head dim. `q [Tq, H, D]`, `k`, `v [Tk, H, D]`,
`out [Tq, H, D]` in the dtype of q, `lse [Tq, H]` in fp32 (fp64 for fp64 inputs). Query segment i attends key
segment i and nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor


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


def packed_lengths(lengths: Tensor) -> PackedLengths:
    """Of an int64 tensor on the host. Layers of one step share the result, and so one upload."""
    return _packed(tuple(lengths.tolist()))


@lru_cache(maxsize=64)
def _packed(lengths: tuple[int, ...]) -> PackedLengths:
    return PackedLengths(lengths)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of all accumulators: never below fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class AttentionKernel(Protocol):
    """A pair of functions behind one contract; never called with an empty segment."""

    name: str

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_lengths: PackedLengths,
        k_lengths: PackedLengths,
        scale: float,
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_lengths: PackedLengths,
        k_lengths: PackedLengths,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...
