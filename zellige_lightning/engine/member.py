"""What a rank does as a member of a split block: exchanges and kernel calls, counted and recorded."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from zellige_lightning.engine.collectives import Exchange, GroupTransport
from zellige_lightning.engine.kernels import attention_backward, attention_forward
from zellige_lightning.engine.layout import BlockLayout, Rows
from zellige_lightning.engine.observer import StepObserver, name_of
from zellige_lightning.engine.packing import PackedLengths, Segments, accumulation_dtype
from zellige_lightning.errors import EngineError
from zellige_lightning.placement.schedule import Block

InFlight = Generator[None, None, tuple[Tensor, ...]]


class Member:
    """One position of a block's rank set. Shapes as in `attention.py`.

    Args:
        most_chunks: bound on the head chunks of an all-gather.

    Attributes:
        phase: `forward` or `backward`, for messages.

    Raises:
        EngineError: a block of which this rank is no member.
    """

    def __init__(
        self, block: Block, rank: int, transport: GroupTransport, observer: StepObserver, most_chunks: int = 1
    ) -> None:
        if rank not in block.ranks:
            raise EngineError(
                f"rank {rank} is to run {name_of(block)}, of which it is no member",
                fix="make each rank's schedule from the same plan with build_schedule",
            )
        self.layout, self.config = BlockLayout(block, block.ranks.index(rank)), block.config
        self.queries = PackedLengths(self.layout.query_lengths)
        self.most_chunks, self.phase = most_chunks, "forward"
        self._block, self._transport, self._observer = block, transport, observer

    def start(self, send: Tensor, rows: tuple[Rows, Rows], kind: str) -> Exchange:
        return self._transport.exchange(send, *rows, self._block, self.layout.position, kind, self.phase)

    def exchange(self, send: Tensor, rows: tuple[Rows, Rows], kind: str) -> Generator[None, None, Tensor]:
        exchange = self.start(send, rows, kind)
        yield
        return exchange.wait()

    def attend(
        self, q: Tensor, kv: Tensor, keys: PackedLengths, scale: float
    ) -> tuple[Tensor, Tensor] | None:
        """out [Lq, *, D] and lse [Lq, *] over packed keys [Lk, *, 2D]; None without queries or keys."""
        if not q.shape[0] or not keys.total:
            return None
        began = self._observer.kernel_begins("forward", kv.numel() * kv.element_size())
        key, value = kv.split(q.shape[-1], dim=-1)
        result = attention_forward(q, key, value, Segments(self.queries, keys, scale))
        self._observer.computed(self._block, began)
        return result

    def differentiate(
        self, dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, keys: PackedLengths, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The part of dq [Lq, *, D] that these keys make, and their dK/dV [Lk, *, 2D], in the accumulation
        dtype."""
        dtype = accumulation_dtype(q.dtype)
        if not q.shape[0] or not keys.total:
            return q.new_zeros(q.shape, dtype=dtype), kv.new_zeros(kv.shape, dtype=dtype)
        began = self._observer.kernel_begins("backward", kv.numel() * kv.element_size())
        key, value = kv.split(q.shape[-1], dim=-1)
        segments = Segments(self.queries, keys, scale)
        dq, *dkv = attention_backward(dout, q, key, value, out, lse, segments)
        self._observer.computed(self._block, began)
        return dq.to(dtype), torch.cat(dkv, dim=-1).to(dtype)
