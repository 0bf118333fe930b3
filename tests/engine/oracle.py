"""What the engine is held to: attention of each sequence alone, in float64, from its definition."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Dense(NamedTuple):
    """Attention of one sequence and its gradients. lse is `[Lq, H]`, all else `[L, H, D]`."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def dense_attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float | None = None) -> Dense:
    """softmax(q k^T scale) v of float64 copies; a query without keys has output 0 and lse -inf."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout.double())
    return Dense(out.detach(), scores.detach().logsumexp(-1).T, dq, dk, dv)


def max_error(got: Tensor, true: Tensor) -> float:
    """Largest deviation, relative to the largest true value."""
    if not true.numel():
        return 0.0
    return float((got.double() - true).abs().max() / true.abs().max().clamp_min(1e-30))


def l2_error(got: Tensor, true: Tensor) -> float:
    """Relative deviation in the L2 norm; the measure for rounding in low precision.

    Inputs are of size one, so values that should be (almost) zero count as if they were of size 0.1.
    """
    return float((got.double() - true).norm() / true.norm().clamp_min(0.1 * max(1, true.numel()) ** 0.5))
