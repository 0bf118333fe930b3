"""Block-diagonal attention on one device, with the log-sum-exp that merging partial results needs.

Shapes: Tq, Tk = packed query and key tokens; H = heads; D = head dim. `q [Tq, H, D]`, `k`, `v [Tk, H, D]`,
`out [Tq, H, D]` in the dtype of q, `lse [Tq, H]` in fp32 (fp64 for fp64 inputs). Query segment i attends key
segment i and nothing else. Nobody else in the package imports an attention kernel.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from zellige_lightning.errors import EngineError

INT32_MAX = 2**31 - 1


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


class AttentionKernel(Protocol):
    """A pair of functions behind one contract; never called with an empty segment."""

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths, scale: float
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


def _runs(q_lengths: PackedLengths, k_lengths: PackedLengths) -> Iterator[tuple[int, int, int, int, int]]:
    """Runs of segments of equal shape as (count, q start, q length, k start, k length)."""
    q_start = k_start = 0
    for (q_length, k_length), run in groupby(zip(q_lengths.lengths, k_lengths.lengths, strict=True)):
        count = len(list(run))
        yield count, q_start, q_length, k_start, k_length
        q_start += count * q_length
        k_start += count * k_length


def _heads_first(x: Tensor, start: int, count: int, length: int) -> Tensor:
    """[T, H, D] -> [count, H, length, D], a view."""
    return x[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)


def _tokens_first(x: Tensor) -> Tensor:
    """[count, H, length, ...] -> [count * length, H, ...]."""
    return x.transpose(1, 2).flatten(0, 1)


class CpuFlashKernel:
    """PyTorch's flash attention for CPU, one call per run of segments of equal shape."""

    name = "cpu_flash"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))
        for count, qs, ql, ks, kl in _runs(q_lengths, k_lengths):
            o, s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(q, qs, count, ql),
                _heads_first(k, ks, count, kl),
                _heads_first(v, ks, count, kl),
                scale=scale,
            )
            out[qs : qs + count * ql] = _tokens_first(o)
            lse[qs : qs + count * ql] = _tokens_first(s)
        return out, lse

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for count, qs, ql, ks, kl in _runs(q_lengths, k_lengths):
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(dout, qs, count, ql),
                _heads_first(q, qs, count, ql),
                _heads_first(k, ks, count, kl),
                _heads_first(v, ks, count, kl),
                _heads_first(out, qs, count, ql),
                _heads_first(lse[..., None], qs, count, ql)[..., 0].contiguous(),
                0.0,
                False,
                scale=scale,
            )
            for into, grad, start, length in zip(
                (dq, dk, dv), grads, (qs, ks, ks), (ql, kl, kl), strict=True
            ):
                into[start : start + count * length] = _tokens_first(grad)
        return dq, dk, dv


class TorchVarlenKernel:
    """The variable-length flash attention that every CUDA build of PyTorch carries (fp16 and bf16)."""

    name = "torch_varlen"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            q_lengths.cumulative(q.device),
            k_lengths.cumulative(q.device),
            q_lengths.longest,
            k_lengths.longest,
            0.0,
            False,
            False,
            scale=scale,
        )
        return out, lse.transpose(0, 1)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)  # rng state and offset, unused at p = 0
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout.contiguous(),
            q,
            k,
            v,
            out,
            lse.transpose(0, 1).contiguous(),
            q_lengths.cumulative(q.device),
            k_lengths.cumulative(q.device),
            q_lengths.longest,
            k_lengths.longest,
            0.0,
            False,
            no_dropout,
            no_dropout,
            scale=scale,
        )
        return dq, dk, dv


class FlashAttnKernel:
    """The flash-attn package (version 2), where it is installed. Arguments are matched by name, since releases
    differ in them; version strings do not compare as numbers."""

    name = "flash_attn"

    def __init__(self) -> None:
        interface: Any = importlib.import_module("flash_attn.flash_attn_interface")
        self._forward, self._backward = (
            interface._flash_attn_varlen_forward,
            interface._flash_attn_varlen_backward,
        )

    def _call(self, function: Any, **arguments: Any) -> Any:
        known = inspect.signature(function).parameters
        return function(**{name: value for name, value in arguments.items() if name in known})

    def _common(self, q: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths) -> dict[str, Any]:
        return {
            "cu_seqlens_q": q_lengths.cumulative(q.device),
            "cu_seqlens_k": k_lengths.cumulative(q.device),
            "max_seqlen_q": q_lengths.longest,
            "max_seqlen_k": k_lengths.longest,
            "dropout_p": 0.0,
            "causal": False,
            "window_size": (-1, -1),
            "window_size_left": -1,
            "window_size_right": -1,
            "softcap": 0.0,
            "alibi_slopes": None,
        }

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths, scale: float
    ) -> tuple[Tensor, Tensor]:
        common = self._common(q, q_lengths, k_lengths)
        result = self._call(self._forward, q=q, k=k, v=v, softmax_scale=scale, return_softmax=False, **common)
        # Four results (out, lse, S_dmask, rng_state), or eight in older releases (out, q, k, v, padded out, lse, ...).
        out, lse = (result[0], result[1]) if len(result) == 4 else (result[0], result[5])
        if lse.dim() != 2:
            raise EngineError(
                "this flash-attn release returns a padded log-sum-exp",
                fix="upgrade flash-attn, or remove it: PyTorch's own kernel is used then",
            )
        return out, lse.transpose(0, 1)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self._call(
            self._backward,
            dout=dout.contiguous(),
            q=q,
            k=k,
            v=v,
            out=out,
            softmax_lse=lse.transpose(0, 1).contiguous(),
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._common(q, q_lengths, k_lengths),
        )
        return dq, dk, dv


class MathKernel:
    """Explicit softmax, in the accumulation dtype: exact for every dtype and device, quadratic in memory."""

    name = "math"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths, scale: float
    ) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for count, qs, ql, ks, kl in _runs(q_lengths, k_lengths):
            scores, values = self._scores(q, k, v, scale, count, qs, ql, ks, kl)
            lse = scores.logsumexp(-1)
            outs.append(_tokens_first((scores - lse[..., None]).exp() @ values).to(q.dtype))
            lses.append(_tokens_first(lse))
        return torch.cat(outs), torch.cat(lses)

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for count, qs, ql, ks, kl in _runs(q_lengths, k_lengths):
            scores, values = self._scores(q, k, v, scale, count, qs, ql, ks, kl)
            p = (scores - _heads_first(lse[..., None], qs, count, ql)).exp()
            do = _heads_first(dout, qs, count, ql).to(scores.dtype)
            delta = (do * _heads_first(out, qs, count, ql).to(scores.dtype)).sum(-1, keepdim=True)
            ds = p * (do @ values.transpose(-1, -2) - delta) * scale
            dq = ds @ _heads_first(k, ks, count, kl).to(scores.dtype)
            dk = ds.transpose(-1, -2) @ _heads_first(q, qs, count, ql).to(scores.dtype)
            parts.append((dq, dk, p.transpose(-1, -2) @ do))
        dq, dk, dv = (torch.cat([_tokens_first(x) for x in xs]) for xs in zip(*parts, strict=True))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    @staticmethod
    def _scores(
        q: Tensor, k: Tensor, v: Tensor, scale: float, count: int, qs: int, ql: int, ks: int, kl: int
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(q.dtype)
        queries, keys = _heads_first(q, qs, count, ql).to(dtype), _heads_first(k, ks, count, kl).to(dtype)
        return queries @ keys.transpose(-1, -2) * scale, _heads_first(v, ks, count, kl).to(dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse and of all accumulators: never below fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=None)
def kernel_for(device_type: str, dtype: torch.dtype) -> AttentionKernel:
    """The kernel for tensors of that kind, chosen by capability."""
    if device_type == "cpu":
        return CpuFlashKernel()
    if device_type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        if importlib.util.find_spec("flash_attn") is not None:
            return FlashAttnKernel()
        return TorchVarlenKernel()
    return MathKernel()


def _check(q: Tensor, k: Tensor, v: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths) -> None:
    if q.dim() != 3 or k.shape != v.shape or q.shape[1:] != k.shape[1:]:
        raise EngineError(
            f"attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}",
            fix="q is [Tq, H, D], k and v are [Tk, H, D]; repeat grouped key/value heads first",
        )
    if not q.dtype == k.dtype == v.dtype:
        raise EngineError(f"attention got dtypes {q.dtype}, {k.dtype}, {v.dtype}", fix="cast them to one dtype")
    if q_lengths.total != q.shape[0] or k_lengths.total != k.shape[0]:
        raise EngineError(
            f"segments hold {q_lengths.total} queries and {k_lengths.total} keys,"
            f" the tensors {q.shape[0]} and {k.shape[0]}"
        )
    if max(q.numel(), k.numel()) > INT32_MAX:
        raise EngineError(
            f"{max(q.numel(), k.numel())} elements in one attention call overflow the kernels' 32-bit offsets",
            fix="lower the token budget per rank",
        )


def _dense(x: Tensor) -> Tensor:
    """Kernels assume that the head dim has stride 1; the CPU kernel returns garbage otherwise."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _without_empty(q: PackedLengths, k: PackedLengths) -> tuple[PackedLengths, PackedLengths, bool]:
    """Drop pairs in which a side is empty: empty segments kill the CPU kernel's process and corrupt others.

    The last value says whether every token is still covered (pairs empty on both sides do not count).
    """
    pairs = [(a, b) for a, b in zip(q.lengths, k.lengths, strict=True) if a and b]
    if len(pairs) == len(q.lengths):
        return q, k, True
    kept_q, kept_k = (PackedLengths(tuple(x)) for x in (zip(*pairs, strict=True) if pairs else ((), ())))
    return kept_q, kept_k, kept_q.total == q.total and kept_k.total == k.total


def _covered(lengths: PackedLengths, other: PackedLengths, device: torch.device) -> Tensor:
    """Indices of the tokens whose segment has tokens on both sides."""
    keep = torch.tensor([bool(b) for b in other.lengths], device=device)
    return torch.repeat_interleave(keep, torch.tensor(lengths.lengths, device=device)).nonzero()[:, 0]


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths, scale: float
) -> tuple[Tensor, Tensor]:
    """Block-diagonal attention; a query without keys gets output 0 and lse -inf.

    Raises:
        EngineError: shapes, dtypes or lengths that do not fit, checked on the host before any kernel runs.
    """
    _check(q, k, v, q_lengths, k_lengths)
    q, k, v = _dense(q), _dense(k), _dense(v)
    kept_q, kept_k, complete = _without_empty(q_lengths, k_lengths)
    kernel = kernel_for(q.device.type, q.dtype)
    if complete and kept_q.total:
        return kernel.forward(q, k, v, kept_q, kept_k, scale)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulation_dtype(q.dtype))
    if kept_q.total:
        rows, keys = _covered(q_lengths, k_lengths, q.device), _covered(k_lengths, q_lengths, q.device)
        out[rows], lse[rows] = kernel.forward(q[rows], k[keys], v[keys], kept_q, kept_k, scale)
    return out, lse


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    q_lengths: PackedLengths,
    k_lengths: PackedLengths,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. `out` and `lse` may be those of more keys than k holds: then dk and dv are exact for
    these keys and dq is their part of the sum, which is what ring attention needs."""
    _check(q, k, v, q_lengths, k_lengths)
    dout, q, k, v, out, lse = (_dense(x) for x in (dout, q, k, v, out, lse))
    kept_q, kept_k, complete = _without_empty(q_lengths, k_lengths)
    kernel = kernel_for(q.device.type, q.dtype)
    if complete and kept_q.total:
        return kernel.backward(dout, q, k, v, out, lse, kept_q, kept_k, scale)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if kept_q.total:
        rows, keys = _covered(q_lengths, k_lengths, q.device), _covered(k_lengths, q_lengths, q.device)
        dq[rows], dk[keys], dv[keys] = kernel.backward(
            dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], kept_q, kept_k, scale
        )
    return dq, dk, dv


class _VarlenAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths, scale: float
    ) -> Tensor:
        out, lse = attention_forward(q, k, v, q_lengths, k_lengths, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.rest = q_lengths, k_lengths, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:  # type: ignore[override]
        return *attention_backward(dout, *ctx.saved_tensors, *ctx.rest), None, None, None


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, q_lengths: list[int], k_lengths: list[int], scale: float | None = None
) -> Tensor:
    """Local block-diagonal attention with autograd and no communication, for cross-attention.

    Args:
        q: `[Tq, H, D]`; k, v: `[Tk, H, D]`.
        q_lengths, k_lengths: host lists of segment lengths; a segment may be empty.
        scale: default D**-0.5.

    Returns:
        `[Tq, H, D]`.

    Raises:
        EngineError: shapes, dtypes or lengths that do not fit.
    """
    packed = PackedLengths(tuple(q_lengths)), PackedLengths(tuple(k_lengths))
    return _VarlenAttention.apply(q, k, v, *packed, scale or q.shape[-1] ** -0.5)  # type: ignore[no-any-return,no-untyped-call]
