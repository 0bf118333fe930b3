"""The one primitive that all split attention is made of: an uneven all-to-all inside a rank set.

Ulysses sends head slices, an all-gather replicates its send, a ring hop sends to one neighbour, a
reduce-scatter is an exchange and a local sum in the accumulation dtype. All sizes come from the plan on
the host, so that no size is ever exchanged and no kernel is waited for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from zellige_lightning.engine.groups import ProcessGroupCache
from zellige_lightning.errors import CollectiveError, EngineError
from zellige_lightning.placement import Block


@dataclass
class Counters:
    """What an engine did since the last reset: bytes sent, exchanges and kernel calls, by kind."""

    bytes_sent: Counter[str] = field(default_factory=Counter)
    exchanges: Counter[str] = field(default_factory=Counter)
    kernel_calls: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        for counter in (self.bytes_sent, self.exchanges, self.kernel_calls):
            counter.clear()


class Work(Protocol):
    def wait(self) -> Any: ...


@dataclass
class Exchange:
    """An all-to-all in flight. Holds its send buffer until `wait`, since the transport still reads it."""

    work: Work
    sent: Tensor
    received: Tensor
    failure: Callable[[RuntimeError], CollectiveError]

    def wait(self) -> Tensor:
        """The received rows.

        Raises:
            CollectiveError: a peer is gone or late; names the block, the rank set and the phase.
        """
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.failure(error) from error
        return self.received


class GroupTransport:
    """Exchanges over the cached process group of a rank set."""

    def __init__(self, groups: ProcessGroupCache, counters: Counters) -> None:
        self._groups, self._counters = groups, counters

    def exchange(
        self,
        send: Tensor,
        send_rows: tuple[int, ...],
        receive_rows: tuple[int, ...],
        block: Block,
        position: int,
        kind: str,
        phase: str,
    ) -> Exchange:
        """Start an all-to-all of rows.

        Args:
            send: `[sum(send_rows), ...]`, contiguous, ordered by position in the rank set.
            send_rows, receive_rows: rows to and from each position; both sides come from one table.
            block: what the exchange is part of; its rank set is who takes part.
            position: of this rank in the rank set.
            kind: `ulysses`, `all_gather`, `ring`, `ring_gradient` or `reduce_scatter`, as counted.
            phase: `forward` or `backward`, for messages.

        Raises:
            EngineError: a buffer that is not contiguous (gloo would corrupt it silently) or of another size.
            CollectiveError: a peer is gone; names the block, the rank set and the phase.
        """
        if not send.is_contiguous() or send.shape[0] != sum(send_rows):
            raise EngineError(
                f"{kind}: send buffer {tuple(send.shape)} does not hold {sum(send_rows)} dense rows"
            )
        width = math.prod(send.shape[1:])
        received = send.new_empty((sum(receive_rows), *send.shape[1:]))
        self._counters.exchanges[kind] += 1
        self._counters.bytes_sent[kind] += (
            (sum(send_rows) - send_rows[position]) * width * send.element_size()
        )

        def failure(error: RuntimeError) -> CollectiveError:
            return CollectiveError(
                f"the {kind} exchange in the {phase} of {_name(block)} failed: {error}",
                fix="the cause is on another of these ranks, which is gone or late: see its messages",
            )

        try:
            work = dist.all_to_all_single(
                received.view(-1),
                send.view(-1),
                [rows * width for rows in receive_rows],
                [rows * width for rows in send_rows],
                group=self._groups.get(block.ranks),
                async_op=True,
            )
        except RuntimeError as error:
            raise failure(error) from error
        return Exchange(work, send, received, failure)


def _name(block: Block) -> str:
    sequences = [str(s.sequence) for s in block.segments]
    shown = ", ".join(sequences[:4] + ["..."] * (len(sequences) > 4))
    return f"sequence {shown} split {block.config} over ranks {block.ranks}"
