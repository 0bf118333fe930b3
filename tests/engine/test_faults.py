"""Exchanges that arrive late, and buffers that hold garbage until they do, change nothing."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_distributed
from tests.engine.mixes import Mix, Result, attend, make_engine, random_mix
from tests.engine.test_schedule_order import Operation, operations
from tests.engine.threads import run_threads
from zellige_lightning.engine import CoalescedAttentionEngine
from zellige_lightning.engine.collectives import Exchange, GroupTransport
from zellige_lightning.errors import EngineError


@dataclass(eq=False)
class LateWork:
    """Garbage in the receive buffer until it arrives, at the latest in `wait`; the send buffer must be left
    alone until then. Before it, others that are in flight arrive, in any order."""

    sent: Tensor
    received: Tensor
    delay_s: float
    in_flight: list[LateWork]

    def __post_init__(self) -> None:
        self.sent_before, self.arrived = self.sent.clone(), self.received.clone()
        self.received.fill_(torch.nan)
        self.in_flight.append(self)

    def wait(self) -> None:
        time.sleep(self.delay_s)
        others = [work for work in self.in_flight if work is not self]
        for work in random.sample(others, random.randint(0, len(others))):
            work.arrive()
        if self in self.in_flight:
            self.arrive()
        # Bits, not numbers: what rides along as raw bytes (lse, padding) may read as NaN.
        assert _bits(self.sent) == _bits(self.sent_before), "a send buffer was overwritten while in flight"

    def arrive(self) -> None:
        self.in_flight.remove(self)
        self.received.copy_(self.arrived)


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


class LateTransport(GroupTransport):
    """Everything arrives after a random delay, in any order; what `straggler` sends, later."""

    rank, straggler = 0, -1

    @cached_property
    def in_flight(self) -> list[LateWork]:
        return []

    def exchange(self, *args: Any) -> Exchange:
        if self.rank == self.straggler:
            time.sleep(2e-3)
        exchange = super().exchange(*args)
        exchange.wait()
        delay_s = random.random() * 1e-3
        exchange.work = LateWork(exchange.sent, exchange.received, delay_s, self.in_flight)
        return exchange


class LoggingTransport(GroupTransport):
    """Remembers the order in which exchanges were started, by pass."""

    log: dict[str, list[Operation]]

    def exchange(self, send: Tensor, sent: Any, received: Any, block: Any, *args: Any) -> Exchange:
        _, kind, which = args
        sequences = tuple(s.sequence for s in block.segments)
        log = self.log.setdefault(which, [])
        before = sum(known[1:3] == (block.ranks, sequences) for known in log)
        log.append((kind, block.ranks, sequences, before))
        return super().exchange(send, sent, received, block, *args)


def with_transport(kind: type[GroupTransport], rank_sets: set[tuple[int, ...]]) -> CoalescedAttentionEngine:
    engine = make_engine(rank_sets)
    assert engine._transport is not None
    engine._transport.__class__ = kind
    return engine


@pytest.mark.parametrize("straggler", [-1, 0, 3])
@pytest.mark.parametrize("seed", range(3))
def test_late_exchanges_change_nothing(seed: int, straggler: int) -> None:
    mix = random_mix(random.Random(seed), 4, 8)

    def work(rank: int) -> tuple[Result, Result]:
        late = with_transport(LateTransport, mix.rank_sets)
        late._transport.rank, late._transport.straggler = rank, straggler  # type: ignore[union-attr]
        return attend(make_engine(mix.rank_sets), mix, rank), attend(late, mix, rank)

    for prompt, late in run_threads(work, 4):
        assert all(torch.equal(a, b) for a, b in zip(prompt, late, strict=True))


def attend_late(rank: int, mix: Mix, straggler: int) -> float:
    engine = with_transport(LateTransport, mix.rank_sets)
    engine._transport.rank, engine._transport.straggler = rank, straggler  # type: ignore[union-attr]
    return mix.worst_error(rank, attend(engine, mix, rank))


def test_a_straggling_process_changes_nothing() -> None:
    mix = random_mix(random.Random(5), 3, 10)
    assert all(error < 1e-13 for error in run_distributed(attend_late, 3, mix, 1))


@pytest.mark.parametrize("seed", range(6))
def test_exchanges_are_started_in_the_one_order(seed: int) -> None:
    """What the engine really does is what is shown to be safe for thousands of plans elsewhere."""
    mix = random_mix(random.Random(seed), 6, 14)

    def work(rank: int) -> dict[str, list[Operation]]:
        engine = with_transport(LoggingTransport, mix.rank_sets)
        engine._transport.log = {}  # type: ignore[union-attr]
        attend(engine, mix, rank)
        return engine._transport.log  # type: ignore[union-attr]

    for which in ("forward", "backward"):
        logs = [log.get(which, []) for log in run_threads(work, 6)]
        assert any(logs)
        assert logs == [operations(mix.schedule(rank), which) for rank in range(6)]


def test_buffers_that_do_not_fit_are_refused() -> None:
    """gloo would send garbage from a strided buffer without a word."""
    mix = random_mix(random.Random(1), 2, 4)
    block = next(b for b in mix.schedule(0).blocks if not b.config.is_whole)

    def work(rank: int) -> None:
        transport = make_engine(mix.rank_sets)._transport
        assert transport is not None
        for buffer in (torch.zeros(4, 2, 3).transpose(1, 2), torch.zeros(5, 2)):
            with pytest.raises(EngineError, match="does not hold 4 dense rows"):
                transport.exchange(buffer, (2, 2), (2, 2), block, rank, "ring", "forward")

    run_threads(work, 2)
