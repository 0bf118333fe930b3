"""Makes memory measurable where another thread moves the exchanges."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zellige_lightning.engine import CoalescedAttentionEngine
from zellige_lightning.engine.collectives import GroupTransport, Work


@contextmanager
def letting_go(engine: CoalescedAttentionEngine) -> Iterator[None]:
    """Exchanges meanwhile end when gloo's thread has let go of their buffers: memory that it frees last makes
    no event in torch's profiler, whose running sum would then never come down again."""
    transport: Any = engine._transport
    start = GroupTransport._start

    def patient(ranks: Any, position: int, received: Tensor, send: Tensor, *sizes: list[int]) -> Work:
        return _Patient(start(transport, ranks, position, received, send, *sizes), (received, send))

    transport._start = patient
    try:
        yield
    finally:
        del transport._start


class _Patient:
    """Waits until nobody else holds the buffers."""

    def __init__(self, work: Work, buffers: Sequence[Tensor]) -> None:
        self._work: Work | None = work
        self._buffers = buffers

    def wait(self) -> None:
        assert self._work is not None, "an exchange is waited for once"
        self._work.wait()
        self._work = None
        while any(buffer._use_count() > 1 for buffer in self._buffers):
            time.sleep(0)
        self._buffers = ()
