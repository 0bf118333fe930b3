"""Stand-ins for kernels that need a GPU: their real signatures and layouts, what they check, and in place of
their arithmetic the explicit kernel. What nobody has written is NaN, as in memory that was used before."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from zellige_lightning.engine.kernels_portable import MathKernel
from zellige_lightning.engine.packing import PackedLengths, Segments

Cumulative = tuple[Tensor, Tensor]


def _lengths(cu: Tensor, rows: int, longest: int) -> PackedLengths:
    assert cu.dtype == torch.int32 and cu.dim() == 1 and cu.is_contiguous()
    lengths = PackedLengths(tuple(cu.diff().tolist()))
    assert min(lengths.lengths) > 0
    assert (lengths.total, lengths.longest) == (rows, longest)
    return lengths


def _check(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.dim() == 3 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu: Cumulative, longest: tuple[int, int], scale: float
) -> tuple[Tensor, Tensor]:
    """out `[T, H, D]` and lse `[H, T]`, as every flash-attn lays them out."""
    _check(q, k, v)
    lengths = [_lengths(c, len(x), most) for c, x, most in zip(cu, (q, k), longest, strict=True)]
    out, lse = MathKernel().forward(q, k, v, Segments(*lengths, scale))
    return out, lse.T.contiguous()


def flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    into: tuple[Tensor | None, Tensor | None, Tensor | None],
    cu: Cumulative,
    longest: tuple[int, int],
    scale: float,
) -> None:
    _check(dout, q, k, v, out)
    assert lse.shape == (q.shape[1], q.shape[0]) and lse.dtype == torch.float32
    assert lse.is_contiguous() and dout.is_contiguous()
    lengths = [_lengths(c, len(x), most) for c, x, most in zip(cu, (q, k), longest, strict=True)]
    for target, grad in zip(
        into, MathKernel().backward(dout, q, k, v, out, lse.T, Segments(*lengths, scale)), strict=True
    ):
        assert target is not None and target.is_contiguous()
        target.copy_(grad)


def _module(name: str, **functions: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(functions)
    return module


def flash_2_6() -> ModuleType:
    """flash-attn before 2.7: window as a pair, eight results."""

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, return_softmax, block_table=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (window_size, dropout_p, causal, softcap, alibi_slopes) == ((-1, -1), 0.0, False, 0.0, None)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        out, lse = flash_forward(q, k, v, cu, longest, softmax_scale)
        return out, q, k, v, out, lse, None, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (window_size, dropout_p, causal, softcap, alibi_slopes) == ((-1, -1), 0.0, False, 0.0, None)
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        flash_backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), cu, longest, softmax_scale)

    return _module(
        "flash_attn.flash_attn_interface",
        _flash_attn_varlen_forward=_flash_attn_varlen_forward,
        _flash_attn_varlen_backward=_flash_attn_varlen_backward,
    )


def flash_2_7() -> ModuleType:
    """flash-attn since 2.7: custom operators, window as two numbers, four results."""

    @torch.library.custom_op("zellige_tests::_flash_attn_varlen_forward", mutates_args=())
    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        return_softmax: bool = False, block_table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert (window_size_left, window_size_right, dropout_p, causal) == (-1, -1, 0.0, False)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        out, lse = flash_forward(q, k, v, cu, longest, softmax_scale)
        return out, lse, q.new_empty(0), q.new_empty(2)

    @torch.library.custom_op("zellige_tests::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
    def _flash_attn_varlen_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
        dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert (window_size_left, window_size_right, dropout_p, causal) == (-1, -1, 0.0, False)
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        flash_backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), cu, longest, softmax_scale)
        return softmax_lse.clone()

    return _module(
        "flash_attn.flash_attn_interface",
        _flash_attn_varlen_forward=_flash_attn_varlen_forward,
        _flash_attn_varlen_backward=_flash_attn_varlen_backward,
    )


def flash_3_functions() -> ModuleType:
    """flash-attn 3 of 2025: functions with few defaults, window as a pair."""

    def _flash_attn_forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
        max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin,
        seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal, window_size=(-1, -1),
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1,
        pack_gqa=None, sm_margin=0,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        unused = (k_new, v_new, qv, out, cu_seqlens_k_new, seqused_q, seqused_k, page_table, kv_batch_idx)
        unused += (leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale)
        assert all(x is None for x in unused)
        assert (causal, window_size, softcap, num_splits) == (False, (-1, -1), 0.0, 1)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return *flash_forward(q, k, v, cu, longest, softmax_scale), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q,
        max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0,
        deterministic=False, sm_margin=0,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (sequed_q, sequed_k, causal, window_size, softcap) == (None, None, False, (-1, -1), 0.0)
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        flash_backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), cu, longest, softmax_scale)
        return dq, dk, dv, softmax_lse

    return _module(
        "flash_attn_interface",
        _flash_attn_forward=_flash_attn_forward,
        _flash_attn_backward=_flash_attn_backward,
    )


def flash_3_operators() -> ModuleType:
    """flash-attn 3 of 2026: custom operators, window as two numbers, `is_causal` in the backward."""

    @torch.library.custom_op("zellige_tests::_flash_attn_forward", mutates_args=())
    def _flash_attn_forward(
        q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
        qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
        seqused_q: Tensor | None = None, seqused_k: Tensor | None = None, max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None, page_table: Tensor | None = None,
        kv_batch_idx: Tensor | None = None, leftpad_k: Tensor | None = None,
        rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
        seqlens_rotary: Tensor | None = None, q_descale: Tensor | None = None,
        k_descale: Tensor | None = None, v_descale: Tensor | None = None,
        softmax_scale: float | None = None, causal: bool = False, window_size_left: int = -1,
        window_size_right: int = -1, attention_chunk: int = 0, softcap: float = 0.0,
        rotary_interleaved: bool = True, scheduler_metadata: Tensor | None = None, num_splits: int = 1,
        pack_gqa: bool | None = None, sm_margin: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert cu_seqlens_q is not None and cu_seqlens_k is not None and softmax_scale is not None
        assert max_seqlen_q is not None and max_seqlen_k is not None
        assert (causal, window_size_left, window_size_right, num_splits) == (False, -1, -1, 1)
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        out, lse = flash_forward(q, k, v, cu, longest, softmax_scale)
        return out, lse, q.new_empty(0), q.new_empty(0)

    @torch.library.custom_op("zellige_tests::_flash_attn_backward", mutates_args=("dq", "dk", "dv"))
    def _flash_attn_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
        sequed_q: Tensor | None = None, sequed_k: Tensor | None = None, max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None, dq: Tensor | None = None, dk: Tensor | None = None,
        dv: Tensor | None = None, softmax_scale: float | None = None, is_causal: bool = False,
        window_size_left: int = -1, window_size_right: int = -1, softcap: float = 0.0,
        deterministic: bool = False, sm_margin: int = 0,
    ) -> Tensor:  # fmt: skip
        assert cu_seqlens_q is not None and cu_seqlens_k is not None and softmax_scale is not None
        assert max_seqlen_q is not None and max_seqlen_k is not None
        assert (is_causal, window_size_left, window_size_right) == (False, -1, -1)
        assert deterministic is torch.are_deterministic_algorithms_enabled()
        cu, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        flash_backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), cu, longest, softmax_scale)
        return softmax_lse.clone()

    return _module(
        "flash_attn_interface",
        _flash_attn_forward=_flash_attn_forward,
        _flash_attn_backward=_flash_attn_backward,
    )


def bound(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that they have in the operator's schema."""
    arguments = operator.default._schema.arguments
    positional = [a.name for a in arguments if not a.kwarg_only]
    assert len(args) <= len(positional)
    given = dict(zip(positional, args, strict=False)) | kwargs
    required = {a.name for a in arguments if not a.has_default_value()}
    assert required <= set(given) <= {a.name for a in arguments}
    return given


class EfficientForward:
    """`aten._efficient_attention_forward` on a GPU. Counts its calls."""

    def __init__(self) -> None:
        self.calls, self._operator = 0, torch.ops.aten._efficient_attention_forward

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        a = bound(self._operator, args, kwargs)
        self.calls += 1
        q, k, v = (a[name][0] for name in ("query", "key", "value"))
        lengths = efficient_lengths(a, q, k)
        assert (a["bias"], a["dropout_p"], a["custom_mask_type"]) == (None, 0.0, 0)
        assert a["compute_log_sumexp"] is True
        out, lse = MathKernel().forward(q, k, v, Segments(*lengths, a["scale"]))
        padded = lse.new_full((len(lengths[0].lengths), q.shape[1], up_to_32(lengths[0].longest)), torch.nan)
        for into, part in zip(padded, lse.split(lengths[0].lengths), strict=True):
            into[:, : up_to_32(len(part))] = torch.inf
            into[:, : len(part)] = part.T
        seed = torch.empty((), dtype=torch.int64)
        return out[None], padded, seed, seed, lengths[0].longest, lengths[1].longest


class EfficientBackward:
    """`aten._efficient_attention_backward` on a GPU."""

    def __init__(self) -> None:
        self._operator = torch.ops.aten._efficient_attention_backward

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        a = bound(self._operator, args, kwargs)
        q, k, v = (a[name][0] for name in ("query", "key", "value"))
        dout, out = a["grad_out_"][0], a["out"][0]
        lengths = efficient_lengths(a, q, k)
        assert (a["bias"], a["dropout_p"], a["custom_mask_type"]) == (None, 0.0, 0)
        assert a["bias_requires_grad"] is False
        assert dout.shape == out.shape == q.shape and out.is_contiguous()
        padded, parts = a["logsumexp"], []
        assert padded.shape == (len(lengths[0].lengths), q.shape[1], up_to_32(lengths[0].longest))
        for segment, length in zip(padded, lengths[0].lengths, strict=True):
            assert segment.is_contiguous()
            assert bool(segment[:, length:].isposinf().all())
            parts.append(segment[:, :length].T)
        lse = torch.cat(parts)
        grads = MathKernel().backward(dout, q, k, v, out, lse, Segments(*lengths, a["scale"]))
        return *(grad[None] for grad in grads), torch.empty(0)


def up_to_32(rows: int) -> int:
    return -(-rows // 32) * 32


def efficient_lengths(a: dict[str, Any], q: Tensor, k: Tensor) -> tuple[PackedLengths, PackedLengths]:
    """What the operators check, and the alignment without which they find no kernel."""
    for name in ("query", "key", "value"):
        x = a[name]
        assert x.dim() == 4 and x.shape[0] == 1 and x.stride(-1) == 1
        assert x.dtype in (torch.float16, torch.bfloat16, torch.float32)
        assert not any(x[0].stride(axis) * x.element_size() % 16 for axis in (0, 1))
        assert x.data_ptr() % 16 == 0
    return (
        _lengths(a["cu_seqlens_q"], len(q), a["max_seqlen_q"]),
        _lengths(a["cu_seqlens_k"], len(k), a["max_seqlen_k"]),
    )
