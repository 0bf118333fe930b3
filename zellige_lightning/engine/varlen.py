"""Local block-diagonal attention as a pair of PyTorch operators, for cross-attention: no communication.

Lengths travel as host tensors, so that a compiled graph serves any number of segments of any length.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import torch
from torch import Tensor

from zellige_lightning.engine.kernels import attention_backward, attention_forward
from zellige_lightning.engine.packing import Segments, accumulation_dtype, packed_lengths
from zellige_lightning.errors import EngineError


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: Rows[int] | Tensor,
    k_lengths: Rows[int] | Tensor,
    scale: float | None = None,
) -> Tensor:
    """Attention of each query segment over the key segment of the same number, with autograd.

    Args:
        q: `[Tq, H, D]`; k, v: `[Tk, H, D]`.
        q_lengths, k_lengths: segment lengths, as integers or as an int64 tensor on the host (which is what
            `torch.compile` needs to keep one graph); a segment may be empty.
        scale: default D**-0.5.

    Returns:
        `[Tq, H, D]`.

    Raises:
        EngineError: shapes, dtypes or lengths that do not fit.
    """
    if not q.device == k.device == v.device:  # the operator itself would be sent to one of them
        raise EngineError(
            f"attention got tensors on {q.device}, {k.device}, {v.device}", fix="use one device"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, _ = _varlen(q, k, v, _host(q_lengths), _host(k_lengths), scale)
    return out


def _host(lengths: Rows[int] | Tensor) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths, dtype=torch.int64)


@torch.library.custom_op("zellige::varlen_attention", mutates_args=())
def _varlen(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: Tensor, k_lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    segments = Segments(packed_lengths(q_lengths), packed_lengths(k_lengths), scale)
    return attention_forward(q, k, v, segments)


@_varlen.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: Tensor, k_lengths: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op("zellige::varlen_attention_backward", mutates_args=())
def _varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    segments = Segments(packed_lengths(q_lengths), packed_lengths(k_lengths), scale)
    return attention_backward(dout, q, k, v, out, lse, segments)


@_varlen_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_lengths: Tensor,
    k_lengths: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_lengths, k_lengths, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, q_lengths, k_lengths)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Any, ...]:
    return *_varlen_backward(dout.contiguous(), *ctx.saved_tensors, ctx.scale), None, None, None


_varlen.register_autograd(_differentiate, setup_context=_save)
