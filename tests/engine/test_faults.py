"""Exchanges that arrive late, and buffers that hold garbage until they do, change nothing."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_distributed
from tests.engine.mixes import Mix, Result, attend, make_engine, random_mix
from tests.engine.test_schedule_order import Operation, is_acyclic, members_agree
from tests.engine.threads import run_threads
from zellige_lightning.engine import CoalescedAttentionEngine
from zellige_lightning.engine.collectives import Exchange, GroupTransport
from zellige_lightning.errors import EngineError


@dataclass
class LateWork:
    """Garbage in the receive buffer until `wait`; the send buffer must be left alone until then."""

    sent: Tensor
    received: Tensor
    delay_s: float

    def __post_init__(self) -> None:
        self.sent_before, self.arrived = self.sent.clone(), self.received.clone()
        self.received.fill_(torch.nan)

    def wait(self) -> None:
        time.sleep(self.delay_s)
        assert torch.equal(self.sent, self.sent_before), "a send buffer was overwritten while in flight"
        self.received.copy_(self.arrived)


class LateTransport(GroupTransport):
    """Everything arrives after a random delay; what `straggler` sends, later."""

    rank, straggler = 0, -1

    def exchange(self, *args: Any) -> Exchange:
        if self.rank == self.straggler:
            time.sleep(2e-3)
        exchange = super().exchange(*args)
        exchange.wait()
        exchange.work = LateWork(exchange.sent, exchange.received, random.random() * 1e-3)
        return exchange


class LoggingTransport(GroupTransport):
    """Remembers the order in which exchanges were started."""

    log: list[Operation]

    def exchange(self, send: Tensor, sent: Any, received: Any, block: Any, *args: Any) -> Exchange:
        kind = args[1]
        sequences = tuple(s.sequence for s in block.segments)
        self.log.append((kind, block.ranks, sequences, self.seen[kind, block.ranks, sequences]))
        self.seen[kind, block.ranks, sequences] += 1
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
def test_exchanges_are_started_in_one_order_without_a_cycle(seed: int) -> None:
    """What the engine really does, forward and backward, over two batches: the order itself is tested in pure
    Python elsewhere."""
    rng = random.Random(seed)
    mixes = [random_mix(rng, 6, 14) for _ in range(2)]
    sets = set().union(*(mix.rank_sets for mix in mixes))

    def work(rank: int) -> list[Operation]:
        engine = with_transport(LoggingTransport, sets)
        engine._transport.log, engine._transport.seen = [], Counter()  # type: ignore[union-attr]
        for mix in mixes:
            attend(engine, mix, rank)
        return engine._transport.log  # type: ignore[union-attr]

    logs = run_threads(work, 6)
    assert any(logs)
    assert members_agree(logs)
    assert is_acyclic(logs)


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
