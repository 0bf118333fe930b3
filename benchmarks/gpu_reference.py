"""Attention from its definition, segment by segment, in any precision: the fp64 oracle, and the dense bf16
computation whose own error is the yardstick.

Shapes: q `[Tq, H, D]`, k, v `[Tk, H, D]`; query segment i attends key segment i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Dense(NamedTuple):
    """out `[Tq, H, D]`, lse `[Tq, H]`, gradients of q, k, v."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def dense_attention(
    inputs: Sequence[Tensor], q_lengths: Sequence[int], k_lengths: Sequence[int], dtype: torch.dtype
) -> Dense:
    """softmax(q k^T D^-1/2) v and its gradients, every intermediate in `dtype`. One head at a time, to bound
    memory. A query without keys has output 0 and lse -inf.

    Args:
        inputs: q, k, v and the gradient of the output.
    """
    q, k, v, dout = (x.detach().to(dtype) for x in inputs)
    out, dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, q, k, v))
    lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    q_start = k_start = 0
    for q_length, k_length in zip(q_lengths, k_lengths, strict=True):
        rows, keys = slice(q_start, q_start + q_length), slice(k_start, k_start + k_length)
        q_start, k_start = q_start + q_length, k_start + k_length
        for heads in _head_groups(q.shape[1], q_length * k_length):
            if q_length and k_length:
                part = _segment(q[rows, heads], k[keys, heads], v[keys, heads], dout[rows, heads])
                out[rows, heads], lse[rows, heads], dq[rows, heads] = part.out, part.lse, part.dq
                dk[keys, heads], dv[keys, heads] = part.dk, part.dv
    return Dense(out, lse, dq, dk, dv)


def _head_groups(heads: int, scores: int) -> list[slice]:
    """All heads at once where the scores are few: tiny segments are many."""
    size = heads if scores < 1 << 20 else 1
    return [slice(start, start + size) for start in range(0, heads, size)]


def _segment(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Dense:
    """Derivatives by hand: ds = p (dout v^T - rowsum(dout out)), in heads-first layout."""
    q, k, v, dout = (x.transpose(0, 1) for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    scores = q @ k.transpose(1, 2) * scale
    p = scores.softmax(-1)
    out = p @ v
    ds = p * (dout @ v.transpose(1, 2) - (dout * out).sum(-1, keepdim=True))
    parts = (
        out,
        scores.logsumexp(-1),
        ds @ k * scale,
        ds.transpose(1, 2) @ q * scale,
        p.transpose(1, 2) @ dout,
    )
    return Dense(*(x.transpose(0, 1) for x in parts))


def l2_error(got: Tensor, true: Tensor) -> float:
    """Relative deviation in the L2 norm; NaN never passes a comparison with it."""
    return float((got.double() - true).norm() / true.norm().clamp_min(1e-30))
