"""Variable-length flash attention on GPUs; shapes as in `packing.py`."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
from torch import Tensor

from zellige_lightning.engine.packing import PackedLengths
from zellige_lightning.errors import EngineError


class TorchVarlenKernel:
    """The variable-length flash attention that every CUDA build of PyTorch carries (fp16 and bf16)."""

    name = "torch_varlen"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_lengths: PackedLengths,
        k_lengths: PackedLengths,
        scale: float,
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
        # rng state and offset, unused at p = 0
        no_dropout = torch.zeros(2, dtype=torch.int64, device=q.device)
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


def _parameters(function: Any) -> set[str]:
    """Names of the parameters. A custom operator, as flash-attn uses since 2.7, tells them by its schema."""
    if (operator := getattr(function, "_opoverload", None)) is not None:
        return {argument.name for argument in operator._schema.arguments}
    return set(inspect.signature(function).parameters)


class FlashAttnKernel:
    """The flash-attn package (version 2), where it is installed. Arguments are matched by name, since
    releases differ in them; version strings do not compare as numbers."""

    name = "flash_attn"

    def __init__(self) -> None:
        interface: Any = importlib.import_module("flash_attn.flash_attn_interface")
        self._forward, self._backward = (
            interface._flash_attn_varlen_forward,
            interface._flash_attn_varlen_backward,
        )

    def _call(self, function: Any, **arguments: Any) -> Any:
        known = _parameters(function)
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
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_lengths: PackedLengths,
        k_lengths: PackedLengths,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        common = self._common(q, q_lengths, k_lengths)
        result = self._call(self._forward, q=q, k=k, v=v, softmax_scale=scale, return_softmax=False, **common)
        # Four results (out, lse, S_dmask, rng_state), or eight in older releases (out, q, k, v, padded
        # out, lse, ...).
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
