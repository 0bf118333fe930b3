"""Steps that a rank runs by itself: for checks that must not keep other ranks waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from zellige_lightning.engine.collectives import GroupTransport, Work
from zellige_lightning.engine.engine import CoalescedAttentionEngine
from zellige_lightning.engine.observer import StepObserver


@contextmanager
def rehearsing(engine: CoalescedAttentionEngine) -> Iterator[None]:
    """What is installed meanwhile allocates and computes as in a step, with exchanges that receive zeros."""
    transport = engine._transport
    if transport is not None:
        engine._transport = _Nobody(engine.observer)
    try:
        yield
    finally:
        engine._transport = transport


def engine_alone() -> CoalescedAttentionEngine:
    """An engine without process groups that takes split schedules, for the same purpose."""
    engine = CoalescedAttentionEngine()
    engine._transport = _Nobody(engine.observer)
    return engine


class _Nobody(GroupTransport):
    """Exchanges that involve no other rank."""

    def __init__(self, observer: StepObserver) -> None:
        super().__init__(None, observer)  # type: ignore[arg-type]

    def _start(
        self,
        ranks: tuple[int, ...],
        position: int,
        received: Tensor,
        send: Tensor,
        receive_sizes: list[int],
        send_sizes: list[int],
    ) -> Work:
        received.zero_()
        return _Done()


class _Done:
    def wait(self) -> None:
        return None
