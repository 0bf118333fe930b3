"""Block-diagonal attention on one device, with the log-sum-exp that merging partial results needs.

Shapes as in `packing.py`. This is the way to every kernel: it checks calls, drops empty segments and makes
tensors dense, so that kernels need not. Nobody else in the package imports one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor

from zellige_lightning.engine.kernels_cuda import FlashAttnKernel, TorchVarlenKernel
from zellige_lightning.engine.kernels_portable import CpuFlashKernel, MathKernel
from zellige_lightning.engine.packing import AttentionKernel, PackedLengths, accumulation_dtype
from zellige_lightning.errors import ConfigError, EngineError

INT32_MAX = 2**31 - 1
BY_NAME: Mapping[str, Callable[[], AttentionKernel]] = MappingProxyType(  # best first
    {
        "cpu_flash": CpuFlashKernel,
        "flash_attn": FlashAttnKernel,
        "torch_varlen": TorchVarlenKernel,
        "math": MathKernel,
    }
)
KERNELS = ("auto", *BY_NAME)
_wanted = "auto"


def prefer_kernel(name: str) -> None:
    """From now on, in this process, use that kernel for all tensors that it takes; `auto` lets capability
    choose."""
    global _wanted
    _wanted = name
    kernel_for.cache_clear()


@cache
def kernel_for(device_type: str, dtype: torch.dtype, head_dim: int) -> AttentionKernel:
    """The kernel for tensors of that kind: the preferred one where it takes them, else the best that does."""
    able = [name for name in BY_NAME if not lacks(name, device_type, dtype, head_dim)]
    return BY_NAME[_wanted if _wanted in able else able[0]]()


def lacks(name: str, device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """Why the kernel cannot take such tensors; empty where it can."""
    if name == "math":
        return ""
    if name == "cpu_flash":
        return "" if device_type == "cpu" else "it runs on CPUs"
    if device_type != "cuda":
        return "it runs on CUDA GPUs"
    if dtype not in (torch.float16, torch.bfloat16) or head_dim % 8 or head_dim > 256:
        return "it takes fp16 and bf16, and head dims that are multiples of 8 up to 256"
    if name == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    return ""


def require_kernel(name: str, device_type: str, dtype: torch.dtype, head_dim: int) -> AttentionKernel:
    """`prefer_kernel`, where it takes the model's tensors; returns the kernel that they get.

    Raises:
        ConfigError: it does not.
    """
    if name != "auto" and (reason := lacks(name, device_type, dtype, head_dim)):
        raise ConfigError(
            f"engine.kernel = {name!r} cannot run {dtype} and head dim {head_dim} on {device_type}: {reason}",
            fix="engine.kernel=auto",
        )
    prefer_kernel(name)
    return kernel_for(device_type, dtype, head_dim)


def _check(q: Tensor, k: Tensor, v: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths) -> None:
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
    _check_lengths(q, k, q_lengths, k_lengths)
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
    """Kernels assume that the head dim has stride 1 (the CPU kernel returns garbage otherwise) and that 32
    bits hold any offset, which may fail in a view of a packed projection."""
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x if x.stride(-1) == 1 and reach <= INT32_MAX else x.contiguous()


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
    kernel = kernel_for(q.device.type, q.dtype, q.shape[-1])
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
    """Gradients of q, k, v.

    `out` and `lse` may be those of more keys than k holds: then dk and dv are exact for these keys and dq is
    their part of the sum, which is what ring attention needs.
    """
    _check(q, k, v, q_lengths, k_lengths)
    dout, q, k, v, out, lse = (_dense(x) for x in (dout, q, k, v, out, lse))
    kept_q, kept_k, complete = _without_empty(q_lengths, k_lengths)
    kernel = kernel_for(q.device.type, q.dtype, q.shape[-1])
    if complete and kept_q.total:
        return kernel.backward(dout, q, k, v, out, lse, kept_q, kept_k, scale)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    if kept_q.total:
        rows, keys = _covered(q_lengths, k_lengths, q.device), _covered(k_lengths, q_lengths, q.device)
        dq[rows], dk[keys], dv[keys] = kernel.backward(
            dout[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], kept_q, kept_k, scale
        )
    return dq, dk, dv
