"""The axes over which keys and values travel: the all-gather over q, and the ring over k.

Shapes as in `attention.py`: everything here is what it is after the head exchange.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property

import torch
from torch import Tensor

from zellige_lightning.engine.collectives import Exchange
from zellige_lightning.engine.layout import gather_chunks
from zellige_lightning.engine.member import InFlight, Member
from zellige_lightning.engine.packing import PackedLengths, accumulation_dtype


class KeyAxes:
    """Attention of a member's queries [Lq, Hh, D] over the keys of all members."""

    def __init__(self, member: Member) -> None:
        self._member, self._layout, self._config = member, member.layout, member.config

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> InFlight:
        """out [Lq, Hh, D] and lse [Lq, Hh], in the accumulation dtype where several parts are merged."""
        kv = torch.cat((k, v), dim=-1)
        if self._config.q == 1:
            return (yield from self._ring_forward(q, kv, scale))
        chunks = self._chunks(kv)
        queries = q.chunk(len(chunks), dim=1)
        parts: list[tuple[Tensor, ...]] = []
        gathering: Exchange | None = self._gather(chunks[0])
        yield
        for part, following in zip(queries, [*chunks[1:], None], strict=True):
            assert gathering is not None
            gathered = gathering.wait()
            # The next chunk is in flight while this one is computed.
            gathering = self._gather(following) if following is not None else None
            parts.append((yield from self._ring_forward(part, gathered, scale)))
        return _joined(parts)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> InFlight:
        """dq [Lq, Hh, D] and dK/dV [Lq, Hh, 2D] of own keys, in the accumulation dtype."""
        kv = torch.cat((k, v), dim=-1)
        if self._config.q == 1:
            return (yield from self._ring_backward(dout, q, kv, out, lse, scale))
        chunks = self._chunks(kv)
        sliced = zip(*(x.chunk(len(chunks), dim=1) for x in (dout, q, out, lse)), strict=True)
        queries, keys = [], []
        gathering: Exchange | None = self._gather(chunks[0])
        reducing: Exchange | None = None
        yield
        for (do, qs, o, s), following in zip(sliced, [*chunks[1:], None], strict=True):
            assert gathering is not None
            gathered = gathering.wait()
            gathering = self._gather(following) if following is not None else None
            dq, dkv = yield from self._ring_backward(do, qs, gathered, o, s, scale)
            if reducing is not None:
                keys.append(self._reduced(reducing))
            reducing = self._member.start(dkv.contiguous(), self._layout.reduce_keys(), "reduce_scatter")
            queries.append(dq)
        assert reducing is not None
        yield
        keys.append(self._reduced(reducing))
        return torch.cat(queries, dim=1), torch.cat(keys, dim=1)

    # ---- the query axis: all-gather of K/V ----

    def _chunks(self, kv: Tensor) -> tuple[Tensor, ...]:
        """[Lq, Hh, 2D] -> the chunks of heads in which it is gathered. One where a ring follows, since each
        chunk would need a ring of its own."""
        if self._config.k > 1:
            return (kv,)
        heads, columns = kv.shape[1:]
        size = self._layout.key_rows(0) * heads * columns * kv.element_size()
        return kv.chunk(gather_chunks(size, heads, self._member.most_chunks), dim=1)

    def _gather(self, kv: Tensor) -> Exchange:
        send = kv.expand(self._config.q, *kv.shape).flatten(0, 1).contiguous()
        return self._member.start(send, self._layout.gather_keys(), "all_gather")

    def _reduced(self, reducing: Exchange) -> Tensor:
        """Partial dK/dV of all query peers -> their sum for own keys, not rounded before."""
        return reducing.wait().unflatten(0, (self._config.q, -1)).sum(0)

    # ---- the key/value axis: ring ----

    def _ring_forward(self, q: Tensor, kv: Tensor, scale: float) -> InFlight:
        """q [Lq, *, D], packed K/V [Lk, *, 2D] -> out, lse over the keys of all ring positions."""
        merged: tuple[Tensor, Tensor] | None = None
        for hop in range(self._config.k):
            following = self._send(kv, hop, "ring") if hop + 1 < self._config.k else None
            part = self._member.attend(q, kv, self._key_lengths(hop), scale)
            if part is not None:
                merged = part if merged is None else _merge(*merged, *part)
            if following is not None:
                yield
                kv = following.wait()
        if merged is None:  # this position has no query
            return q.new_zeros(q.shape), q.new_zeros(q.shape[:2], dtype=accumulation_dtype(q.dtype))
        return merged

    def _ring_backward(
        self, dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """dq [Lq, *, D] and dK/dV [Lk, *, 2D] of this position's ring block, in the accumulation dtype.

        K/V travel as in forward; the dK/dV sums travel one hop behind and come home after k hops.
        """
        dq: Tensor | None = None
        arriving: Exchange | None = None
        for hop in range(self._config.k):
            following = self._send(kv, hop, "ring") if hop + 1 < self._config.k else None
            part, dkv = self._member.differentiate(dout, q, kv, out, lse, self._key_lengths(hop), scale)
            dq = part if dq is None else dq + part
            if arriving is not None:
                yield
                dkv += arriving.wait()
            if self._config.k > 1:
                arriving = self._send(dkv, hop, "ring_gradient")
            if following is not None:
                if hop == 0:  # later ones are started before the pause above
                    yield
                kv = following.wait()
        if arriving is not None:
            yield
            dkv = arriving.wait()
        assert dq is not None
        return dq, dkv

    def _key_lengths(self, hop: int) -> PackedLengths:
        if len(self._member.queries.lengths) > 1:
            return self._member.queries
        return self._hop_lengths[self._layout.ring_block(hop)]

    @cached_property
    def _hop_lengths(self) -> list[PackedLengths]:
        return [PackedLengths((self._layout.key_rows(ik),)) for ik in range(self._config.k)]

    def _send(self, rows: Tensor, hop: int, kind: str) -> Exchange:
        return self._member.start(rows, self._layout.ring_hop(hop), kind)


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The results of head chunks side by side."""
    return parts[0] if len(parts) == 1 else tuple(torch.cat(x, dim=1) for x in zip(*parts, strict=True))


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two key sets, from the results over each (ring attention, Sec. II-B)."""
    weight = torch.sigmoid(part_lse - lse)[..., None]
    out = out.to(lse.dtype)
    return out - weight * (out - part_out), torch.logaddexp(lse, part_lse)
