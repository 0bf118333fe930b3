"""Where whole sequences run changes no bit of any result, and no exchange."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.mixes import Mix, Result, degrees, make_engine, random_mix
from tests.engine.threads import run_threads
from zellige_lightning.engine import CoalescedAttentionEngine, Counters
from zellige_lightning.engine.attention import SplitAttention
from zellige_lightning.engine.dry_run import dry_run
from zellige_lightning.engine.member import InFlight
from zellige_lightning.placement import (
    AttentionGeometry,
    Filling,
    ParallelConfig,
    PlacementOption,
    RankSchedule,
    whole,
)
from zellige_lightning.placement.filling import work_between_pauses
from zellige_lightning.placement.schedule import PASSES


def random_filling(rng: random.Random, schedule: RankSchedule) -> Filling:
    """Any number of sequences in any pause, more than there are now and then."""
    passes = []
    for which in PASSES:
        split = [b.config for b in schedule.blocks if not b.config.is_whole]
        pauses = range(sum(len(work_between_pauses(config, which)) - 1 for config in split))
        chosen = sorted(rng.sample(pauses, rng.randint(0, min(4, len(pauses)))))
        passes.append(tuple((pause, rng.randint(1, 3)) for pause in chosen))
    return Filling(*passes)


def attend_under(engine: CoalescedAttentionEngine, mix: Mix, schedule: RankSchedule) -> Result:
    engine.install(schedule)
    q, k, v, dout = mix.local(schedule.rank)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = engine(q, k, v)
    out.backward(dout)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("seed", range(6))
def test_any_filling_gives_the_same_bits(seed: int) -> None:
    mix = random_mix(random.Random(seed), 4, 14)

    def work(rank: int) -> tuple[list[Result], list[Counters], Counters]:
        plain = mix.schedule(rank)
        filled = replace(plain, filling=random_filling(random.Random(100 * seed + rank), plain))
        engine = make_engine(mix.rank_sets)
        results, counted = [], []
        for schedule in (plain, filled):
            results.append(attend_under(engine, mix, schedule))
            counted.append(deepcopy(engine.counters))
            engine.counters.reset()
        return results, counted, dry_run(filled, AttentionGeometry(mix.heads, mix.dim, 8, 8))

    filled_somewhere = False
    for (one, other), (before, after), expected in run_threads(work, 4):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert before.bytes_sent == after.bytes_sent and before.exchanges == after.exchanges
        assert after == expected
        filled_somewhere |= before.kernel_calls != after.kernel_calls
    assert filled_somewhere


def test_the_engine_pauses_where_the_filling_thinks() -> None:
    """Every configuration on up to 6 ranks."""
    configs = degrees(6)
    rank_sets = {tuple(range(config.degree)) for config in configs}

    def work(rank: int) -> list[list[int]]:
        engine = make_engine(rank_sets)
        found: list[list[int]] = []
        for config in configs:
            mix = Mix(6, (23,), (PlacementOption(config, tuple(range(config.degree))),))
            if rank < config.degree:
                found.append(count_pauses(engine, mix, rank))
        return found

    for rank, found in enumerate(run_threads(work, 6)):
        expected = [
            [len(work_between_pauses(config, which)) - 1 for which in PASSES]
            for config in configs
            if rank < config.degree
        ]
        assert found == expected


def count_pauses(engine: CoalescedAttentionEngine, mix: Mix, rank: int) -> list[int]:
    """Of the only block of `mix`, in forward and in backward."""
    q, k, v, dout = mix.local(rank)
    (block,) = mix.schedule(rank).blocks
    assert engine._transport is not None
    attention = SplitAttention(block, rank, engine._transport, engine.observer, most_chunks=4)
    forward, (out, lse) = exhaust(attention.forward(q, k, v, 1.0))
    backward, _ = exhaust(attention.backward(dout, q, k, v, out, lse, 1.0))
    return [forward, backward]


def exhaust(running: InFlight) -> tuple[int, tuple[Tensor, ...]]:
    pauses = 0
    while True:
        try:
            next(running)
        except StopIteration as done:
            return pauses, done.value
        pauses += 1


def test_sequences_run_in_the_pause_that_the_filling_names() -> None:
    """x: an exchange is started, and waited for at the dot; w: a piece of the pack runs, k: the split
    sequence's kernel."""
    pair = PlacementOption(ParallelConfig(1, 2, 1), (0, 1))
    mix = Mix(2, (12, 3, 3, 3), (pair, whole(0), whole(0), whole(0)))
    filling = Filling(((0, 1), (1, 1)), ((1, 2),))

    def work(rank: int) -> str:
        engine, log = make_engine(mix.rank_sets), []
        transport, observer = engine._transport, engine.observer
        assert transport is not None
        exchange, begins = transport.exchange, observer.kernel_begins

        def logged_exchange(*args: Any) -> Any:
            log.append("x")
            started = exchange(*args)
            wait = started.wait

            def logged_wait() -> Tensor:
                log.append(".")
                return wait()

            started.wait = logged_wait  # type: ignore[method-assign]
            return started

        def logged_kernel(which: str, kv_bytes: int = 0) -> Any:
            log.append("k" if kv_bytes else "w")
            return begins(which, kv_bytes)

        transport.exchange, observer.kernel_begins = logged_exchange, logged_kernel  # type: ignore[method-assign]
        attend_under(engine, mix, replace(mix.schedule(rank), filling=filling))
        return "".join(log)

    assert run_threads(work, 2) == ["xw.kxw.w" + "x.kxw.w", "x.kx." + "x.kx."]
