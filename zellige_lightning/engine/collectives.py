"""The one primitive that all split attention is made of: an uneven all-to-all inside a rank set.

Ulysses sends head slices, an all-gather replicates its send, a ring hop sends to one neighbour, a
reduce-scatter is an exchange and a local sum in the accumulation dtype. All sizes come from the plan on
the host, so that no size is ever exchanged and no kernel is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from zellige_lightning.engine.counters import link_between
from zellige_lightning.engine.groups import ProcessGroupCache
from zellige_lightning.engine.observer import StepObserver, name_of
from zellige_lightning.engine.timeline import Mark, Timeline
from zellige_lightning.errors import CollectiveError, EngineError
from zellige_lightning.placement import Block


class Work(Protocol):
    def wait(self) -> Any: ...


@dataclass
class Exchange:
    """An all-to-all in flight. Holds its send buffer until `wait`, since the transport still reads it."""

    work: Work
    sent: Tensor
    received: Tensor
    failure: Callable[[RuntimeError], CollectiveError]
    record: Record | None = None

    def wait(self) -> Tensor:
        """The received rows.

        Raises:
            CollectiveError: a peer is gone or late; names the block, the rank set, phase, layer and step.
        """
        began = self.record.timeline.mark() if self.record is not None else None
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.failure(error) from error
        if self.record is not None:
            self.record.arrived(began)
        return self.received


@dataclass(frozen=True)
class Record:
    """How an exchange is entered into a timeline."""

    timeline: Timeline
    name: str
    site: str
    started: Mark | None

    def arrived(self, waiting_since: Mark | None) -> None:
        self.timeline.add("wait", self.name, self.site, waiting_since)
        self.timeline.add("exchange", self.name, self.site, self.started)


class GroupTransport:
    """Exchanges over the cached process group of a rank set, or over the group of all ranks where it has
    none: there a rank set's exchange is a batch of point-to-point transfers, in which nobody else takes part.
    """

    def __init__(self, groups: ProcessGroupCache, observer: StepObserver) -> None:
        self._groups, self._observer = groups, observer

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
            CollectiveError: a peer is gone; names the block, the rank set, phase, layer and step.
        """
        if not send.is_contiguous() or send.shape[0] != sum(send_rows):
            raise EngineError(
                f"{kind}: send buffer {tuple(send.shape)} does not hold {sum(send_rows)} dense rows"
            )
        received = send.new_empty((sum(receive_rows), *send.shape[1:]))
        width, observer = math.prod(send.shape[1:]), self._observer
        own = block.ranks[position]
        observer.counters.sent(
            kind,
            [
                (link_between(own, peer, observer.topology), rows * width * send.element_size())
                for peer, rows in zip(block.ranks, send_rows, strict=True)
                if peer != own
            ],
        )
        failure = self._failure(block, kind, phase)
        record = self._record(block, kind)
        sizes = [rows * width for rows in receive_rows], [rows * width for rows in send_rows]
        try:
            work = self._start(block.ranks, position, received.view(-1), send.view(-1), *sizes)
        except RuntimeError as error:
            raise failure(error) from error
        return Exchange(work, send, received, failure, record)

    def _start(
        self,
        ranks: tuple[int, ...],
        position: int,
        received: Tensor,
        send: Tensor,
        receive_sizes: list[int],
        send_sizes: list[int],
    ) -> Work:
        group = self._groups.find(ranks)
        if group is None:
            parts = received.split(receive_sizes), send.split(send_sizes)
            return _point_to_point(self._groups.parent, ranks, position, *parts)
        work: Work = dist.all_to_all_single(
            received, send, receive_sizes, send_sizes, group=group, async_op=True
        )
        return work

    def _failure(self, block: Block, kind: str, phase: str) -> Callable[[RuntimeError], CollectiveError]:
        step, site = self._observer.step, self._observer.site

        def failure(error: RuntimeError) -> CollectiveError:
            return CollectiveError(
                f"the {kind} exchange in the {phase} of {name_of(block)} failed ({site}): {error}",
                fix="the cause is on another of these ranks, which is gone or late: see its messages",
                step=step,
            )

        return failure

    def _record(self, block: Block, kind: str) -> Record | None:
        timeline = self._observer.timeline
        if not timeline.recording:
            return None
        return Record(timeline, f"{kind}, {name_of(block)}", self._observer.site, timeline.mark())


@dataclass(frozen=True)
class _All:
    """Several transfers as one."""

    works: Sequence[Work]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _point_to_point(
    parent: dist.ProcessGroup,
    ranks: tuple[int, ...],
    position: int,
    received: Sequence[Tensor],
    send: Sequence[Tensor],
) -> Work:
    """Sends `send[p]` to position p and receives `received[p]` from it.

    Both sides read their sizes from one table, so each transfer has its counterpart, and those without
    elements are left out on both sides.
    """
    received[position].copy_(send[position])
    operations = []
    for peer, into, rows in zip(ranks, received, send, strict=True):
        if peer == ranks[position]:
            continue
        if into.numel():
            operations.append(dist.P2POp(dist.irecv, into, peer, parent))
        if rows.numel():
            operations.append(dist.P2POp(dist.isend, rows, peer, parent))
    return _All(dist.batch_isend_irecv(operations) if operations else ())
