"""Kernels that run wherever PyTorch does; shapes as in `packing.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from zellige_lightning.engine.packing import Segments, TensorKind, accumulation_dtype, joined


def _runs(segments: Segments) -> Iterator[tuple[int, int, int, int, int]]:
    """Runs of segments of equal shape as (count, q start, q length, k start, k length)."""
    q_start = k_start = 0
    lengths = zip(segments.queries.lengths, segments.keys.lengths, strict=True)
    for (q_length, k_length), run in groupby(lengths):
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

    @staticmethod
    def lacks(kind: TensorKind) -> str:
        return "" if kind.device_type == "cpu" else "it runs on CPUs"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        parts = []
        for count, qs, ql, ks, kl in _runs(segments):
            o, s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(q, qs, count, ql),
                _heads_first(k, ks, count, kl),
                _heads_first(v, ks, count, kl),
                scale=segments.scale,
            )
            parts.append((_tokens_first(o), _tokens_first(s)))
        out, lse = joined(parts)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = []
        for count, qs, ql, ks, kl in _runs(segments):
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(dout, qs, count, ql),
                _heads_first(q, qs, count, ql),
                _heads_first(k, ks, count, kl),
                _heads_first(v, ks, count, kl),
                _heads_first(out, qs, count, ql),
                _heads_first(lse[..., None], qs, count, ql)[..., 0].contiguous(),
                0.0,
                False,
                scale=segments.scale,
            )
            parts.append(tuple(_tokens_first(grad) for grad in grads))
        dq, dk, dv = joined(parts)
        return dq, dk, dv


class MathKernel:
    """Explicit softmax, in the accumulation dtype: exact for every dtype and device, quadratic in memory."""

    name = "math"

    @staticmethod
    def lacks(kind: TensorKind) -> str:
        return ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        outs, lses = [], []
        for count, qs, ql, ks, kl in _runs(segments):
            scores, values = self._scores(q, k, v, segments.scale, count, qs, ql, ks, kl)
            lse = scores.logsumexp(-1)
            outs.append(_tokens_first((scores - lse[..., None]).exp() @ values).to(q.dtype))
            lses.append(_tokens_first(lse))
        return torch.cat(outs), torch.cat(lses)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for count, qs, ql, ks, kl in _runs(segments):
            scores, values = self._scores(q, k, v, segments.scale, count, qs, ql, ks, kl)
            p = (scores - _heads_first(lse[..., None], qs, count, ql)).exp()
            do = _heads_first(dout, qs, count, ql).to(scores.dtype)
            delta = (do * _heads_first(out, qs, count, ql).to(scores.dtype)).sum(-1, keepdim=True)
            ds = p * (do @ values.transpose(-1, -2) - delta) * segments.scale
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
