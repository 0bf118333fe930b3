"""One attention for every (q, h, k) (paper, Sec. IV-A and Table II): a head all-to-all over h, an
all-gather of K/V over q, a ring over k, and the inverse all-to-all; each skipped at degree 1.

Shapes: t = local tokens, H = heads, D = head dim, Hh = H/h, Lq = query rows and Lk = key rows after the
exchanges. Functions are generators that yield while an exchange is in flight, so that the engine can
compute something else meanwhile. Every participant issues the same exchanges in the same order, also with
no rows to send.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from zellige_lightning.engine.collectives import GroupTransport
from zellige_lightning.engine.kernels import attention_backward, attention_forward
from zellige_lightning.engine.keys import KeyAxes
from zellige_lightning.engine.layout import padding_bytes
from zellige_lightning.engine.member import InFlight, Member
from zellige_lightning.engine.observer import StepObserver
from zellige_lightning.engine.packing import PackedLengths, Segments
from zellige_lightning.placement.schedule import Block


class WholePack:
    """All whole sequences of a rank: one block-diagonal call, no communication."""

    def __init__(self, block: Block, observer: StepObserver) -> None:
        self._lengths = PackedLengths(tuple(len(s) for s in block.segments))
        self._block, self._observer = block, observer

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        began = self._observer.kernel_begins("forward")
        result = attention_forward(q, k, v, Segments(self._lengths, self._lengths, scale))
        self._observer.computed(self._block, began)
        return result

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        began = self._observer.kernel_begins("backward")
        segments = Segments(self._lengths, self._lengths, scale)
        result = attention_backward(dout, q, k, v, out, lse, segments)
        self._observer.computed(self._block, began)
        return result


class SplitAttention:
    """A split block: a batch of pure-Ulysses sequences, or one sequence of any other configuration.

    Args:
        most_chunks: bound on the head chunks of an all-gather.

    Raises:
        EngineError: a block of which this rank is no member.
    """

    def __init__(
        self, block: Block, rank: int, transport: GroupTransport, observer: StepObserver, most_chunks: int = 1
    ) -> None:
        self._member = Member(block, rank, transport, observer, most_chunks)
        self._keys = KeyAxes(self._member)
        self._layout, self._config = self._member.layout, block.config
        self._segments: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> InFlight:
        """Of local q, k, v `[t, H, D]`; returns out `[t, H, D]` and lse `[t, H]`."""
        self._member.phase = "forward"
        dim, dtype = q.shape[-1], q.dtype
        q, k, v = yield from self._scatter_heads((q, k, v))
        out, lse = yield from self._keys.forward(q, k, v, scale)
        if self._config.h == 1:
            return out.to(dtype), lse
        columns = _as_columns(lse, dtype)
        received = yield from self._gather_heads(torch.cat((out.to(dtype), columns), dim=-1))
        return received[..., :dim], _from_columns(received[..., dim:], lse.dtype)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> InFlight:
        """Of local tensors as `forward` saw and returned them; returns dq, dk, dv `[t, H, D]`."""
        self._member.phase = "backward"
        dim, dtype = q.shape[-1], q.dtype
        columns = _as_columns(lse, dtype)
        q, k, v, out, dout, columns = yield from self._scatter_heads((q, k, v, out, dout, columns))
        lse = _from_columns(columns, lse.dtype)
        dq, dkv = yield from self._keys.backward(dout, q, k, v, out, lse, scale)
        gradients = torch.cat((dq.to(dtype), dkv.to(dtype)), dim=-1)
        if self._config.h > 1:
            gradients = yield from self._gather_heads(gradients)
        return gradients.split(dim, dim=-1)

    # ---- the head axis: Ulysses ----

    def _scatter_heads(self, tensors: tuple[Tensor, ...]) -> InFlight:
        """Each [t, H, X] -> [Lq, Hh, X], in one exchange. Rows become contiguous by sequence."""
        h = self._config.h
        if h == 1:
            return tensors
        widths = [x.shape[-1] for x in tensors]
        tokens, heads = tensors[0].shape[:2]
        size = tensors[0].element_size()
        spare = padding_bytes(sum(widths) * size) // size
        send = tensors[0].new_empty((h, tokens, heads // h, sum(widths) + spare))
        for part, x in zip(send.split([*widths, spare], dim=-1), tensors, strict=False):
            part.copy_(x.unflatten(1, (h, heads // h)).transpose(0, 1))
        if spare:  # what is sent does not depend on what was in this memory before
            send[..., -spare:] = 0
        received = yield from self._member.exchange(
            send.flatten(0, 1), self._layout.scatter_heads(), "ulysses"
        )
        if len(self._member.queries.lengths) > 1:
            received = received.index_select(0, self._member_index(received.device)[0])
        return received.split([*widths, spare], dim=-1)[:-1]

    def _gather_heads(self, x: Tensor) -> Generator[None, None, Tensor]:
        """[Lq, Hh, X] -> [t, H, X]."""
        if len(self._member.queries.lengths) > 1:
            x = x.index_select(0, self._member_index(x.device)[1])
        received = yield from self._member.exchange(x.contiguous(), self._layout.gather_heads(), "ulysses")
        # [h * t, Hh, X] -> [h, t, Hh, X] -> [t, H, X]
        return received.unflatten(0, (self._config.h, -1)).transpose(0, 1).flatten(1, 2)

    def _member_index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row permutation from peer-major to sequence-major order, and its inverse."""
        if device not in self._segments:
            pieces = [torch.arange(start, stop) for start, stop in self._layout.member_pieces()]
            order = torch.cat(pieces)
            self._segments[device] = order.to(device), torch.argsort(order).to(device)
        return self._segments[device]


def _as_columns(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """[..] in the accumulation dtype -> [.., c] of `dtype`, the same bytes, to ride in a packed exchange."""
    return lse.contiguous()[..., None].view(dtype)


def _from_columns(columns: Tensor, dtype: torch.dtype) -> Tensor:
    return columns.contiguous().view(dtype)[..., 0]
