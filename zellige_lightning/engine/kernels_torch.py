"""The flash attention that every CUDA build of PyTorch carries; shapes as in `packing.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from zellige_lightning.engine.packing import Segments, TensorKind

HALF = (torch.float16, torch.bfloat16)
AMPERE = 80
CONSUMER = (86, 89, 120, 121)  # less shared memory per block than the data center GPUs of their generation


def flash_2_lacks(kind: TensorKind) -> str:
    """Why no FlashAttention 2 can take such tensors; empty where it can."""
    if kind.device_type != "cuda":
        return "it runs on CUDA GPUs"
    if kind.dtype not in HALF or kind.head_dim % 8 or kind.head_dim > 256:
        return "it takes fp16 and bf16, and head dims that are multiples of 8 up to 256"
    if kind.capability < AMPERE:
        return "it needs an Ampere GPU or a newer one"
    if kind.capability in CONSUMER and 192 < kind.head_dim <= 224:
        return "its backward for head dims above 192 and up to 224 needs a data center GPU"
    return ""


class TorchVarlenKernel:
    """The variable-length flash attention of PyTorch: FlashAttention 2, or what has been activated in its
    place (`torch.nn.attention.activate_flash_attention_impl`)."""

    name = "torch_varlen"

    @staticmethod
    def lacks(kind: TensorKind) -> str:
        if not (reason := flash_2_lacks(kind)) and not torch.backends.cuda.is_flash_attention_available():
            return "this build of PyTorch has no flash attention"
        return reason

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            *segments.cumulative(q.device),
            *segments.longest,
            0.0,
            False,
            False,
            scale=segments.scale,
        )
        return out, lse.transpose(0, 1).contiguous()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
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
            *segments.cumulative(q.device),
            *segments.longest,
            0.0,
            False,
            no_dropout,
            no_dropout,
            scale=segments.scale,
        )
        return dq, dk, dv
