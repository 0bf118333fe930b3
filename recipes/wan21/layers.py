"""The parts of a Wan2.1 block, for packed tokens.

Legend: T local tokens of S segments laid end to end, d model width, H heads, D head size. Precision is
explicit: what the original computes in fp32 is written with `full_precision` here, whatever the weights have.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def full_precision(x: Tensor) -> Tensor:
    """fp32, or fp64 where it is fp64 already."""
    return x if x.dtype == torch.float64 else x.float()


class FullPrecisionLinear(nn.Linear):
    """A linear layer computed in fp32 (time embedding and head).

    Autocast would send the product to bf16 in spite of fp32 arguments, so it is off inside. These layers lie
    outside of every checkpointed block; a recomputed block must not change autocast.
    """

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else full_precision(self.bias)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(
                full_precision(x).to(full_precision(self.weight).dtype), full_precision(self.weight), bias
            )


class RMSNorm(nn.Module):
    """Root mean square norm over the whole width: all heads together, hence before any split of heads."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = full_precision(x)
        y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


class LayerNorm(nn.LayerNorm):
    """Layer norm computed in fp32, returned in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else full_precision(self.weight)
        bias = None if self.bias is None else full_precision(self.bias)
        return F.layer_norm(full_precision(x), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


@torch.library.custom_op("wan21::segment_sums", mutates_args=())
def segment_sums(rows: Tensor, lengths: Tensor) -> Tensor:
    """`[T, d]` -> `[S, d]`, with the segments' lengths in a host tensor `[S]`.

    Slices in a fixed order, not atomics, so that gradients repeat to the last bit.
    """
    if not len(lengths):
        return rows.new_zeros(0, rows.shape[-1])
    return torch.stack([part.sum(dim=0) for part in rows.split(lengths.tolist())])


@segment_sums.register_fake
def _(rows: Tensor, lengths: Tensor) -> Tensor:
    return rows.new_empty(lengths.shape[0], rows.shape[-1])


class _SegmentAffine(torch.autograd.Function):
    """y[t] = x[t] * scale[segment of t] + shift[segment of t], in fp32.

    Autograd would keep scale per token, 4d bytes for each token and use; this keeps x and the `[S, d]` table.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, shift: Tensor | None, segment_ids: Tensor, lengths: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, scale, segment_ids, lengths)
        ctx.has_shift = shift is not None
        y = full_precision(x) * scale[segment_ids]
        return y if shift is None else y + shift[segment_ids]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, scale, segment_ids, lengths = ctx.saved_tensors
        grad_scale = segment_sums(grad * full_precision(x), lengths)
        grad_shift = segment_sums(grad.contiguous(), lengths) if ctx.has_shift else None
        return (grad * scale[segment_ids]).to(x.dtype), grad_scale, grad_shift, None, None


def modulate(x: Tensor, shift: Tensor, scale: Tensor, segment_ids: Tensor, lengths: Tensor) -> Tensor:
    """x * (1 + scale) + shift with `[S, d]` tables; `[T, d]` in fp32."""
    return _SegmentAffine.apply(x, 1.0 + scale, shift, segment_ids, lengths)


def add_gated(x: Tensor, y: Tensor, gate: Tensor, segment_ids: Tensor, lengths: Tensor) -> Tensor:
    """The residual x + y * gate with an `[S, d]` gate: summed in fp32, kept in the type of x."""
    gated = _SegmentAffine.apply(y, gate, None, segment_ids, lengths)
    return (full_precision(x) + gated).to(x.dtype)


def sinusoidal_embedding(timesteps: Tensor, dim: int) -> Tensor:
    """`[S]` -> `[S, dim]`: cosines, then sines, computed in fp64."""
    half = dim // 2
    rates = torch.pow(10000.0, -torch.arange(half, device=timesteps.device, dtype=torch.float64) / half)
    angles = torch.outer(timesteps.double(), rates)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def rope_table(positions: Tensor, pairs: tuple[int, int, int]) -> Tensor:
    """Unit complex numbers `[T, 1, D/2]` (complex128) of absolute (t, y, x) positions `[T, 3]`.

    A shard passes its own positions and so gets its own rows of the whole grid's table.
    """
    angles = []
    for axis, n in enumerate(pairs):
        rates = torch.pow(10000.0, -torch.arange(n, device=positions.device, dtype=torch.float64) / n)
        angles.append(torch.outer(positions[:, axis].double(), rates))
    angle = torch.cat(angles, dim=1)
    return torch.polar(torch.ones_like(angle), angle)[:, None]


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs of `[T, H, D]` in fp64; the result has the type of x."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))  # [T, H, D/2]
    return torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)
