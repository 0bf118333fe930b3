"""One attention for every (q, h, k) (paper, Sec. IV-A and Table II): a head all-to-all over h, an
all-gather of K/V over q, a ring over k, and the inverse all-to-all; each skipped at degree 1.

Shapes: t = local tokens, H = heads, D = head dim, Hh = H/h, Lq = query rows and Lk = key rows after the
exchanges. Functions are generators that yield while an exchange is in flight, so that the engine can
compute something else meanwhile. Every participant issues the same exchanges in the same order, also with
no rows to send.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property

import torch
from torch import Tensor

from zellige_lightning.engine.collectives import Counters, Exchange, GroupTransport
from zellige_lightning.engine.kernels import attention_backward, attention_forward
from zellige_lightning.engine.layout import BlockLayout, Rows
from zellige_lightning.engine.packing import PackedLengths, accumulation_dtype
from zellige_lightning.placement.schedule import Block

InFlight = Generator[None, None, tuple[Tensor, ...]]

# Received rows start at multiples of it: GPU kernels load 16 bytes at a time, and the last bit of a CPU
# matrix product depends on the alignment.
ALIGNMENT_BYTES = 16


class WholePack:
    """All whole sequences of a rank: one block-diagonal call, no communication."""

    def __init__(self, block: Block, counters: Counters) -> None:
        self._lengths = PackedLengths(tuple(len(s) for s in block.segments))
        self._counters = counters

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        self._counters.kernel_calls["forward"] += 1
        return attention_forward(q, k, v, self._lengths, self._lengths, scale)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._counters.kernel_calls["backward"] += 1
        return attention_backward(dout, q, k, v, out, lse, self._lengths, self._lengths, scale)


class SplitAttention:
    """A split block: a batch of pure-Ulysses sequences, or one sequence of any other configuration."""

    def __init__(self, block: Block, rank: int, transport: GroupTransport, counters: Counters) -> None:
        self.layout = BlockLayout(block, block.ranks.index(rank))
        self._block, self._config, self._phase = block, block.config, "forward"
        self._transport, self._counters = transport, counters
        self._queries = PackedLengths(self.layout.query_lengths)
        self._members: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> InFlight:
        """Of local q, k, v `[t, H, D]`; returns out `[t, H, D]` and lse `[t, H]`."""
        self._phase = "forward"
        dim, dtype = q.shape[-1], q.dtype
        q, k, v = yield from self._scatter_heads((q, k, v))
        kv = yield from self._gather_keys(k, v)
        out, lse = yield from self._ring_forward(q, kv, scale)
        if self._config.h == 1:
            return out.to(dtype), lse
        columns = _as_columns(lse, dtype)
        received = yield from self._gather_heads(torch.cat((out.to(dtype), columns), dim=-1))
        return received[..., :dim], _from_columns(received[..., dim:], lse.dtype)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> InFlight:
        """Of local tensors as `forward` saw and returned them; returns dq, dk, dv `[t, H, D]`."""
        self._phase = "backward"
        dim, dtype = q.shape[-1], q.dtype
        columns = _as_columns(lse, dtype)
        q, k, v, out, dout, columns = yield from self._scatter_heads((q, k, v, out, dout, columns))
        lse = _from_columns(columns, lse.dtype)
        kv = yield from self._gather_keys(k, v)
        dq, dkv = yield from self._ring_backward(dout, q, kv, out, lse, scale)
        dkv = yield from self._reduce_keys(dkv)
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
        spare = -sum(widths) % (ALIGNMENT_BYTES // tensors[0].element_size())
        send = tensors[0].new_empty((h, tokens, heads // h, sum(widths) + spare))
        for part, x in zip(send.split([*widths, spare], dim=-1), tensors, strict=False):
            part.copy_(x.unflatten(1, (h, heads // h)).transpose(0, 1))
        received = yield from self._exchange(send.flatten(0, 1), self.layout.scatter_heads(), "ulysses")
        if len(self._queries.lengths) > 1:
            received = received.index_select(0, self._member_index(received.device)[0])
        return received.split([*widths, spare], dim=-1)[:-1]

    def _gather_heads(self, x: Tensor) -> Generator[None, None, Tensor]:
        """[Lq, Hh, X] -> [t, H, X]."""
        if len(self._queries.lengths) > 1:
            x = x.index_select(0, self._member_index(x.device)[1])
        received = yield from self._exchange(x.contiguous(), self.layout.gather_heads(), "ulysses")
        # [h * t, Hh, X] -> [h, t, Hh, X] -> [t, H, X]
        return received.unflatten(0, (self._config.h, -1)).transpose(0, 1).flatten(1, 2)

    def _member_index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row permutation from peer-major to sequence-major order, and its inverse."""
        if device not in self._members:
            pieces = [torch.arange(start, stop) for start, stop in self.layout.member_pieces()]
            order = torch.cat(pieces)
            self._members[device] = order.to(device), torch.argsort(order).to(device)
        return self._members[device]

    # ---- the query axis: all-gather of K/V ----

    def _gather_keys(self, k: Tensor, v: Tensor) -> Generator[None, None, Tensor]:
        """k, v [Lq, Hh, D] -> packed K/V [Lk, Hh, 2D] of this position's ring block."""
        kv = torch.cat((k, v), dim=-1)
        if self._config.q == 1:
            return kv
        send = kv.expand(self._config.q, *kv.shape).flatten(0, 1).contiguous()
        return (yield from self._exchange(send, self.layout.gather_keys(), "all_gather"))

    def _reduce_keys(self, dkv: Tensor) -> Generator[None, None, Tensor]:
        """Partial dK/dV [Lk, Hh, 2D] of all query peers -> their sum for own keys, not rounded before."""
        if self._config.q == 1:
            return dkv
        parts = yield from self._exchange(dkv.contiguous(), self.layout.reduce_keys(), "reduce_scatter")
        return parts.unflatten(0, (self._config.q, -1)).sum(0)

    # ---- the key/value axis: ring ----

    def _ring_forward(self, q: Tensor, kv: Tensor, scale: float) -> InFlight:
        """q [Lq, Hh, D], packed K/V [Lk, Hh, 2D] -> out, lse over all keys, in the accumulation dtype."""
        merged: tuple[Tensor, Tensor] | None = None
        for hop in range(self._config.k):
            following = self._ring_send(kv, hop, "ring") if hop + 1 < self._config.k else None
            if following is not None:
                yield
            keys = self._key_lengths(hop)
            if keys.total and q.shape[0]:
                self._counters.kernel_calls["forward"] += 1
                key, value = kv.split(q.shape[-1], dim=-1)
                part = attention_forward(q, key, value, self._queries, keys, scale)
                merged = part if merged is None else _merge(*merged, *part)
            if following is not None:
                kv = following.wait()
        if merged is None:  # this position has no query
            return q.new_zeros(q.shape), q.new_zeros(q.shape[:2], dtype=accumulation_dtype(q.dtype))
        return merged

    def _ring_backward(
        self, dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> InFlight:
        """dq [Lq, Hh, D] and dK/dV [Lk, Hh, 2D] of this position's ring block, in the accumulation dtype.

        K/V travel as in forward; the dK/dV sums travel one hop behind and come home after k hops.
        """
        dtype = accumulation_dtype(q.dtype)
        dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
        arriving: Exchange | None = None
        for hop in range(self._config.k):
            following = self._ring_send(kv, hop, "ring") if hop + 1 < self._config.k else None
            if following is not None:
                yield
            if kv.shape[0] and q.shape[0]:
                self._counters.kernel_calls["backward"] += 1
                key, value = kv.split(q.shape[-1], dim=-1)
                lengths = self._queries, self._key_lengths(hop)
                part_q, *part_kv = attention_backward(dout, q, key, value, out, lse, *lengths, scale)
                dq += part_q
                dkv = torch.cat(part_kv, dim=-1).to(dtype)
            else:
                dkv = torch.zeros(kv.shape, dtype=dtype, device=kv.device)
            if arriving is not None:
                dkv += arriving.wait()
            if self._config.k > 1:
                arriving = self._ring_send(dkv, hop, "ring_gradient")
            if following is not None:
                kv = following.wait()
        return dq, arriving.wait() if arriving is not None else dkv

    def _key_lengths(self, hop: int) -> PackedLengths:
        if len(self._queries.lengths) > 1:
            return self._queries
        return self._hop_lengths[self.layout.ring_block(hop)]

    @cached_property
    def _hop_lengths(self) -> list[PackedLengths]:
        return [PackedLengths((self.layout.key_rows(ik),)) for ik in range(self._config.k)]

    def _ring_send(self, rows: Tensor, hop: int, kind: str) -> Exchange:
        return self._start(rows, self.layout.ring_hop(hop), kind)

    # ---- transport ----

    def _exchange(self, send: Tensor, rows: tuple[Rows, Rows], kind: str) -> Generator[None, None, Tensor]:
        exchange = self._start(send, rows, kind)
        yield
        return exchange.wait()

    def _start(self, send: Tensor, rows: tuple[Rows, Rows], kind: str) -> Exchange:
        return self._transport.exchange(send, *rows, self._block, self.layout.position, kind, self._phase)


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two key sets, from the results over each (ring attention, Sec. II-B)."""
    weight = torch.sigmoid(part_lse - lse)[..., None]
    out = out.to(lse.dtype)
    return out - weight * (out - part_out), torch.logaddexp(lse, part_lse)


def _as_columns(lse: Tensor, dtype: torch.dtype) -> Tensor:
    """[..] in the accumulation dtype -> [.., c] of `dtype`, the same bytes, to ride in a packed exchange."""
    return lse.contiguous()[..., None].view(dtype)


def _from_columns(columns: Tensor, dtype: torch.dtype) -> Tensor:
    return columns.contiguous().view(dtype)[..., 0]
