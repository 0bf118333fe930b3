"""Block-diagonal attention on one device, with the log-sum-exp that merging partial results needs.

Shapes as in `packing.py`. This is the way to every kernel: it checks calls, drops empty segments and makes
tensors dense, so that kernels need not. Nobody else in the package imports one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zellige_lightning.engine.kernel_choice import kernel_for
from zellige_lightning.engine.packing import ALIGNMENT, PackedLengths, Segments, accumulation_dtype
from zellige_lightning.errors import EngineError

INT32_MAX = 2**31 - 1


def _check(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> None:
    if q.dim() != 3 or k.shape != v.shape or q.shape[1:] != k.shape[1:]:
        raise EngineError(
            f"attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            fix="q is [Tq, H, D], k and v are [Tk, H, D]; repeat grouped key/value heads first",
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise EngineError(
            f"attention got dtypes {q.dtype}, {k.dtype}, {v.dtype}", fix="cast them to one floating dtype"
        )
    if not q.device == k.device == v.device:
        raise EngineError(
            f"attention got tensors on {q.device}, {k.device}, {v.device}", fix="use one device"
        )
    _check_lengths(q, k, segments.queries, segments.keys)
    if (largest := max(q.numel(), k.numel())) > INT32_MAX:
        raise EngineError(
            f"{largest} elements in one attention call overflow the kernels' 32-bit offsets",
            fix="lower the token budget per rank",
        )


def _check_lengths(q: Tensor, k: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths) -> None:
    if len(q_lengths.lengths) != len(k_lengths.lengths):
        raise EngineError(
            f"attention got {len(q_lengths.lengths)} query segments and {len(k_lengths.lengths)} of keys",
            fix="query segment i attends key segment i; give an absent one the length 0",
        )
    if min(q_lengths.lengths + k_lengths.lengths, default=0) < 0:
        raise EngineError("a segment has a negative length", fix="lengths are numbers of tokens")
    if q_lengths.total != q.shape[0] or k_lengths.total != k.shape[0]:
        raise EngineError(
            f"segments hold {q_lengths.total} queries and {k_lengths.total} keys,"
            f" the tensors {q.shape[0]} and {k.shape[0]}"
        )


def _dense(x: Tensor) -> Tensor:
    """Kernels assume that the head dim has stride 1 (the CPU kernel returns garbage otherwise), that 32 bits
    hold any offset, and on GPUs that rows begin at whole 16 bytes. A view of a packed projection may fail
    each."""
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    if x.stride(-1) == 1 and reach <= INT32_MAX and _is_aligned(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: Tensor) -> bool:
    """As well as a copy would be: rows of odd length are aligned in no layout."""
    step = ALIGNMENT // x.element_size()
    return bool(x.shape[-1] % step) or not any(n % step for n in (x.storage_offset(), *x.stride()[:-1]))


def _without_empty(segments: Segments) -> tuple[Segments, bool]:
    """Drop pairs in which a side is empty: empty segments kill the CPU kernel's process and corrupt others.

    The last value says whether every token is still covered (pairs empty on both sides do not count).
    """
    q, k = segments.queries, segments.keys
    pairs = [(a, b) for a, b in zip(q.lengths, k.lengths, strict=True) if a and b]
    if len(pairs) == len(q.lengths):
        return segments, True
    queries, keys = (PackedLengths(tuple(x)) for x in (zip(*pairs, strict=True) if pairs else ((), ())))
    complete = queries.total == q.total and keys.total == k.total
    return Segments(queries, keys, segments.scale), complete


def _covered(segments: Segments, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of the queries and of the keys whose segment has tokens on both sides."""
    sides = [torch.tensor(x.lengths, device=device) for x in (segments.queries, segments.keys)]
    keep = (sides[0] > 0) & (sides[1] > 0)
    rows, keys = (torch.repeat_interleave(keep, side).nonzero()[:, 0] for side in sides)
    return rows, keys


def attention_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Block-diagonal attention; a query without keys gets output 0 and lse -inf.

    Raises:
        EngineError: shapes, dtypes or lengths that do not fit, checked on the host before any kernel runs.
    """
    _check(q, k, v, segments)
    q, k, v = _dense(q), _dense(k), _dense(v)
    kept, complete = _without_empty(segments)
    kernel = kernel_for(q.device.type, q.dtype, q.shape[-1])
    if complete and kept.queries.total:
        return kernel.forward(q, k, v, kept)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype))
    if kept.queries.total:
        rows, keys = _covered(segments, q.device)
        out[rows], lse[rows] = kernel.forward(q[rows], k[keys], v[keys], kept)
    return out, lse


def attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v.

    `out` and `lse` may be those of more keys than k holds: then dk and dv are exact for these keys and dq is
    their part of the sum, which is what ring attention needs.
    """
    _check(q, k, v, segments)
    dout, q, k, v, out, lse = (_dense(x) for x in (dout, q, k, v, out, lse))
    kept, complete = _without_empty(segments)
    kernel = kernel_for(q.device.type, q.dtype, q.shape[-1])
    if complete and kept.queries.total:
        return kernel.backward(dout, q, k, v, out, lse, kept)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if kept.queries.total:
        rows, keys = _covered(segments, q.device)
        dq[rows], dk[keys], dv[keys] = kernel.backward(
            dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], kept
        )
    return dq, dk, dv
