"""Memory-efficient attention, which every CUDA build of PyTorch carries; shapes as in `packing.py`."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from zellige_lightning.engine.kernels_torch import AMPERE, HALF
from zellige_lightning.engine.packing import (
    ALIGNMENT,
    PackedLengths,
    Segments,
    TensorKind,
    joined,
    shared_lengths,
)

LSE_ROWS = 32  # log-sum-exps of a segment come in multiples of that many rows
NO_MASK = 0
MOST_SEGMENTS = 2**16 - 1  # of one call: the third dimension of a CUDA grid
SPARE_ROWS = 4096  # that padding may cost a pack of any size


class TorchEfficientKernel:
    """The memory-efficient attention behind scaled-dot-product attention: fp32, and GPUs before Ampere.

    It keeps `[segments, H, longest query segment]` log-sum-exps, so packs are cut into pieces of segments of
    similar length. Head dims are padded with zeros to 16 bytes, which changes no result.
    """

    name = "torch_efficient"

    @staticmethod
    def lacks(kind: TensorKind) -> str:
        if kind.device_type != "cuda" or torch.version.hip is not None:
            return "it runs on CUDA GPUs"
        if kind.dtype not in (*HALF, torch.float32):
            return "it takes fp16, bf16 and fp32"
        if kind.dtype == torch.bfloat16 and kind.capability < AMPERE:
            return "in bf16 it needs an Ampere GPU or a newer one"
        return ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        head_dim, parts = q.shape[-1], []
        q, k, v = (_padded(x) for x in (q, k, v))
        for piece, rows, columns in _pieces(segments):
            o, s, *_ = torch.ops.aten._efficient_attention_forward(
                q[None, rows],
                k[None, columns],
                v[None, columns],
                None,
                *piece.cumulative(q.device),
                *piece.longest,
                0.0,
                NO_MASK,
                True,
                scale=piece.scale,
            )
            segment, row = _places(piece.queries, q.device)
            parts.append((o[0, :, :, :head_dim], s[segment, :, row]))
        out, lse = joined(parts)
        return out.contiguous(), lse.contiguous()

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        head_dim, parts = q.shape[-1], []
        dout, q, k, v, out = (_padded(x) for x in (dout.contiguous(), q, k, v, out.contiguous()))
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)  # seed and offset, unused at p = 0
        for piece, rows, columns in _pieces(segments):
            grads = torch.ops.aten._efficient_attention_backward(
                dout[None, rows],
                q[None, rows],
                k[None, columns],
                v[None, columns],
                None,
                out[None, rows],
                *piece.cumulative(q.device),
                *piece.longest,
                _by_segment(lse[rows], piece.queries),
                0.0,
                no_dropout,
                no_dropout,
                NO_MASK,
                False,
                scale=piece.scale,
            )
            parts.append(tuple(grad[0, :, :, :head_dim] for grad in grads[:3]))
        dq, dk, dv = (grad.contiguous() for grad in joined(parts))
        return dq, dk, dv


def _padded(x: Tensor) -> Tensor:
    """Head dims of whole 16 bytes; a copy only where they are not."""
    missing = -x.shape[-1] % (ALIGNMENT // x.element_size())
    return F.pad(x, (0, missing)) if missing else x


def _places(lengths: PackedLengths, device: torch.device) -> tuple[Tensor, Tensor]:
    """Segment and row in it of every token, without waiting for the device."""
    starts = lengths.cumulative(device)
    segment = torch.repeat_interleave(starts.diff(), output_size=lengths.total)
    return segment, torch.arange(lengths.total, device=device) - starts[segment]


def _by_segment(lse: Tensor, lengths: PackedLengths) -> Tensor:
    """[T, H] -> [segments, H, longest segment], with the +inf that the kernel writes past a segment's end:
    exp(score - inf) is 0, which is what rows that do not exist should contribute."""
    rows = -(-lengths.longest // LSE_ROWS) * LSE_ROWS
    padded = lse.new_full((len(lengths.lengths), lse.shape[1], rows), torch.inf)
    segment, row = _places(lengths, lse.device)
    padded[segment, :, row] = lse
    return padded


def _pieces(segments: Segments) -> list[tuple[Segments, slice, slice]]:
    """Parts of a pack with their rows of queries and of keys."""
    pieces, row, column = [], 0, 0
    for queries, keys in cut(segments.queries.lengths, segments.keys.lengths):
        rows, columns = slice(row, row + queries.total), slice(column, column + keys.total)
        pieces.append((Segments(queries, keys, segments.scale), rows, columns))
        row, column = rows.stop, columns.stop
    return pieces


@lru_cache(maxsize=64)
def cut(q: tuple[int, ...], k: tuple[int, ...]) -> tuple[tuple[PackedLengths, PackedLengths], ...]:
    """Consecutive segments that their longest one pads to little more than twice their size.

    One video among 200 images, all padded to its length, would take gigabytes: log-sum-exps, and in half
    precision an fp32 gradient of q.
    """
    starts, total, longest = [0], (0, 0), (0, 0)
    for i, pair in enumerate(zip(q, k, strict=True)):
        total = total[0] + pair[0], total[1] + pair[1]
        longest = max(longest[0], pair[0]), max(longest[1], pair[1])
        if not _alike(i + 1 - starts[-1], total, longest):
            starts.append(i)
            total = longest = pair
    return tuple((shared_lengths(q[a:b]), shared_lengths(k[a:b])) for a, b in pairwise([*starts, len(q)]))


def _alike(segments: int, total: tuple[int, int], longest: tuple[int, int]) -> bool:
    return segments <= MOST_SEGMENTS and all(
        segments * most <= 2 * tokens + SPARE_ROWS for tokens, most in zip(total, longest, strict=True)
    )
