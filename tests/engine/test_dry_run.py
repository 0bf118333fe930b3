"""The numbers of a dry run are those that the engine counts."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from tests.distributed import run_distributed
from tests.engine.mixes import Mix, attend, make_engine, random_mix
from tests.engine.test_schedule_order import random_plan
from tests.engine.threads import run_threads
from zellige_lightning.engine import Counters, layout
from zellige_lightning.engine.counters import KINDS, LINKS
from zellige_lightning.engine.dry_run import CHECKPOINTED, STORED, dry_run
from zellige_lightning.placement import (
    AttentionGeometry,
    ParallelConfig,
    PlacementOption,
    Topology,
    build_schedule,
)
from zellige_lightning.simulator.traffic import attention_bytes


def geometry_of(mix: Mix) -> AttentionGeometry:
    accumulation = 8 if mix.dtype == torch.float64 else 4
    return AttentionGeometry(mix.heads, mix.dim, mix.dtype.itemsize, accumulation)


def counted(mix: Mix, rank: int, topology: Topology, transport: str = "groups") -> Counters:
    engine = make_engine(mix.rank_sets, transport=transport)
    engine.observer.topology = topology
    attend(engine, mix, rank)
    return engine.counters


def predicted(mix: Mix, rank: int, topology: Topology) -> Counters:
    return dry_run(mix.schedule(rank), geometry_of(mix), topology)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
@pytest.mark.parametrize("seed", range(4))
def test_random_plans_on_threads(
    seed: int, chunk_bytes: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "SMALLEST_CHUNK_BYTES", chunk_bytes)
    rng = random.Random(seed)
    drawn = random_mix(rng, rng.choice([3, 6, 8]), 14)
    mix = Mix(
        drawn.world_size, drawn.lengths, drawn.options, drawn.heads, 10, dtype
    )  # rows that need padding
    topology = Topology.uniform(mix.world_size, 2)
    results = run_threads(lambda rank: counted(mix, rank, topology), mix.world_size)
    assert any(result.bytes_sent for result in results)
    for rank, result in enumerate(results):
        assert result == predicted(mix, rank, topology), mix
        assert sum(result.link_bytes.values()) == result.total_bytes


def count_on_process(rank: int, mix: Mix, transport: str) -> list[int]:
    return counted(mix, rank, Topology.uniform(mix.world_size, 2), transport).to_integers()


@pytest.mark.parametrize("transport", ["groups", "parent"])
def test_random_plans_on_processes(transport: str) -> None:
    mix = random_mix(random.Random(3), 4, 16)
    for rank, result in enumerate(run_distributed(count_on_process, 4, mix, transport)):
        assert result == predicted(mix, rank, Topology.uniform(4, 2)).to_integers()


def test_integers_hold_everything() -> None:
    before = Counters(
        Counter({kind: i + 1 for i, kind in enumerate(KINDS)}),
        Counter({kind: i + 10 for i, kind in enumerate(KINDS)}),
        Counter(forward=3, backward=4),
        Counter({link: i + 20 for i, link in enumerate(LINKS)}),
        77,
    )
    assert Counters.of_integers(before.to_integers()) == before
    before.reset()
    assert before == Counters()


LENGTH, HEADS, DIM = 120, 12, 8  # divisible by every degree below
KEY_VALUE = 2 * HEADS * DIM * 4  # kv of Table II: bytes per token


@pytest.mark.parametrize("degree", [2, 3, 4, 6])
@pytest.mark.parametrize(
    ("axis", "kind", "exchanges", "payload", "resident"),
    [
        # the part that a rank has itself is not sent
        ("q", "all_gather", lambda n: 1, lambda n: LENGTH * KEY_VALUE * (n - 1) // n, lambda n: 1),
        ("h", "ulysses", lambda n: 2, None, lambda n: n),
        ("k", "ring", lambda n: n - 1, lambda n: (n - 1) * LENGTH * KEY_VALUE // n, lambda n: n),
    ],
)
def test_forward_equals_table_two(
    axis: str, kind: str, exchanges: object, payload: object, resident: object, degree: int
) -> None:
    config = ParallelConfig(**{"q": 1, "h": 1, "k": 1, axis: degree})
    mix = Mix(degree, (LENGTH,), (PlacementOption(config, tuple(range(degree))),), HEADS, DIM, torch.float32)

    def work(rank: int) -> Counters:
        engine = make_engine(mix.rank_sets)
        engine.install(mix.schedule(rank))
        engine(*mix.local(rank)[:3])
        return engine.counters

    # Ulysses: q, k, v before attention; the output behind it, with its log-sum-exp
    heads_out = LENGTH // degree * (2 * KEY_VALUE + HEADS * 4) * (degree - 1) // degree
    for rank, result in enumerate(run_threads(work, degree)):
        assert result == dry_run(mix.schedule(rank), geometry_of(mix), passes={"forward": 1})
        assert dict(result.exchanges) == {kind: exchanges(degree)}  # type: ignore[operator]
        assert result.total_bytes == (payload(degree) if payload else heads_out)  # type: ignore[operator]
        assert result.resident_kv_bytes == LENGTH * KEY_VALUE // resident(degree)  # type: ignore[operator]


def test_layers_and_recomputation_multiply() -> None:
    mix = random_mix(random.Random(0), 4, 8)
    schedule, geometry = mix.schedule(0), geometry_of(mix)
    forward, backward = (dry_run(schedule, geometry, passes={p: 1}) for p in ("forward", "backward"))
    stored = dry_run(schedule, geometry, passes=STORED, num_layers=3)
    recomputed = dry_run(schedule, geometry, passes=CHECKPOINTED, num_layers=3)
    assert stored.total_bytes == 3 * (forward.total_bytes + backward.total_bytes)
    assert recomputed.total_bytes == 3 * (2 * forward.total_bytes + backward.total_bytes)
    assert recomputed.kernel_calls["forward"] == 2 * stored.kernel_calls["forward"] > 0


def test_many_ranks_need_no_process() -> None:
    """Up to N = 64, against the simulator's own walk over a placement."""
    for seed in range(6):
        rng = random.Random(seed)
        world = (2, 8, 16, 24, 48, 64)[seed]
        options, lengths = random_plan(rng, world, 24)
        topology = Topology.uniform(world, 8)
        schedules = [build_schedule(options, lengths, rank, world) for rank in range(world)]
        ours = [
            dry_run(s, AttentionGeometry(12, 128), topology, CHECKPOINTED, num_layers=2) for s in schedules
        ]
        theirs = attention_bytes(options, lengths, topology, AttentionGeometry(12, 128), num_layers=2)
        assert tuple(result.total_bytes for result in ours) == theirs.by_rank
        for kind in KINDS:
            assert sum(result.bytes_sent[kind] for result in ours) == theirs.by_kind[kind]
        assert sum(result.link_bytes["node"] for result in ours) == theirs.by_link["node"]
        assert sum(result.link_bytes["network"] for result in ours) == theirs.total - theirs.by_link["node"]
        assert theirs.total
