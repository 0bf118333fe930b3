"""Split and whole attention on threaded ranks against attention of each sequence alone."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.engine.mixes import Mix, Result, attend, degrees, every_configuration, make_engine, random_mix
from tests.engine.oracle import l2_error, max_error
from tests.engine.threads import run_threads
from zellige_lightning.engine import CoalescedAttentionEngine
from zellige_lightning.errors import EngineError
from zellige_lightning.placement import ParallelConfig, PlacementOption, whole

NAMES = ("out", "dq", "dk", "dv")


def on_ranks(*ranks: int, q: int = 1, h: int = 1, k: int = 1) -> PlacementOption:
    return PlacementOption(ParallelConfig(q, h, k), ranks)


def on_threads(*mixes: Mix) -> list[list[Result]]:
    """The results of every rank for each mix, one after the other on the same engines."""
    sets = set().union(*(mix.rank_sets for mix in mixes))

    def work(rank: int) -> list[Result]:
        engine = make_engine(sets)
        return [attend(engine, mix, rank) for mix in mixes]

    return [list(results) for results in zip(*run_threads(work, mixes[0].world_size), strict=True)]


def on_processes(rank: int, mixes: list[Mix]) -> list[tuple[Any, ...]]:
    """Of each mix, the results of this rank as float64 arrays."""
    engine = make_engine(set().union(*(mix.rank_sets for mix in mixes)))
    return [tuple(x.double().numpy() for x in attend(engine, mix, rank)) for mix in mixes]


def assert_exact(mix: Mix, results: list[Result], tolerance: float) -> None:
    for i, (got, dense) in enumerate(zip(mix.gather(results), mix.dense, strict=True)):
        for name, a, b in zip(NAMES, got, (dense.out, dense.dq, dense.dk, dense.dv), strict=True):
            assert max_error(a, b) <= tolerance, f"{name} of sequence {i} in {mix}"


# Long, shorter than every degree, and uneven; the last makes two Ulysses sequences coalesce.
LENGTHS = (67, 3, 1, 40)
CONFIGS = degrees(8, further=(12,))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration_is_exact(config: ParallelConfig) -> None:
    ranks = tuple(range(config.degree))
    mix = Mix(config.degree, LENGTHS, (PlacementOption(config, ranks),) * 3 + (whole(0),))
    assert_exact(mix, on_threads(mix)[0], 1e-13)


def test_the_configurations_are_those_of_the_paper_and_more() -> None:
    powers = [c for c in CONFIGS if c.degree in (2, 4, 8) and all(n & n - 1 == 0 for n in (c.q, c.h, c.k))]
    assert len(powers) == 18  # what the paper profiles for 12 heads (Sec. V)
    assert {ParallelConfig(1, h, 1) for h in (2, 3, 4, 6, 12)} <= set(CONFIGS)
    assert ParallelConfig(1, 8, 1) not in CONFIGS


def assert_within(mix: Mix, results: list[Result]) -> None:
    """Of float64 in double and single precision; in half precision an error of at most twice that of dense
    attention of each sequence alone."""
    if mix.dtype in TOLERANCES:
        assert_exact(mix, results, TOLERANCES[mix.dtype])
        return
    got, plain = mix.gather(results), mix.dense_in_own_dtype()
    for i, (name, key) in enumerate(zip(NAMES, ("out", "dq", "dk", "dv"), strict=True)):
        ours, dense, true = (
            torch.cat([part.flatten() for part in parts])
            for parts in ([g[i] for g in got], [p[i] for p in plain], [getattr(d, key) for d in mix.dense])
        )
        assert ours.dtype == mix.dtype
        assert true.abs().mean() > 0.02, "a reference near zero shows nothing"
        assert l2_error(ours, true) <= 2 * l2_error(dense, true), f"{name} in {mix}"


TOLERANCES = {torch.float64: 1e-13, torch.float32: 5e-6}
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [3, 6, 12])
def test_every_configuration_on_eight_ranks(heads: int, dtype: torch.dtype) -> None:
    mix = every_configuration(8, heads, dtype)
    assert_within(mix, on_threads(mix)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "config", [(4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (1, 2, 2), (2, 2, 2), (1, 1, 8)]
)
def test_long_sequences_in_lower_precision(config: tuple[int, int, int], dtype: torch.dtype) -> None:
    option = PlacementOption(ParallelConfig(*config), tuple(range(ParallelConfig(*config).degree)))
    mix = Mix(option.config.degree, (260,), (option,), heads=4, dim=32, dtype=dtype)
    assert_within(mix, on_threads(mix)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_random_mixes_in_lower_precision(seed: int, dtype: torch.dtype) -> None:
    mix = replace(random_mix(random.Random(seed), 8, 20), dtype=dtype)
    assert_within(mix, on_threads(mix)[0])


@pytest.mark.parametrize("seed", range(12))
def test_random_mixes(seed: int) -> None:
    rng = random.Random(seed)
    world = rng.choice([2, 3, 4, 5, 6, 8])
    first, second = (random_mix(rng, world, rng.randint(1, 20)) for _ in range(2))
    # two different batches in a row, then the first once more: nothing of a batch may stay behind
    results = on_threads(first, second, first)
    assert_exact(first, results[0], 1e-13)
    assert_exact(second, results[1], 1e-13)
    for before, after in zip(results[0], results[2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_an_idle_rank_and_an_empty_shard() -> None:
    mix = Mix(4, (2, 9), (on_ranks(0, 1, 3, k=3), on_ranks(0, 3, h=2)))
    results = on_threads(mix)[0]
    assert [len(r[0]) for r in results] == [4, 1, 0, 6]
    empty_first = Mix(3, (2,), (on_ranks(0, 1, 2, q=3),))
    assert empty_first.schedule(0).num_tokens == 0
    assert_exact(mix, results, 1e-13)
    assert_exact(empty_first, on_threads(empty_first)[0], 1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("degree", [2, 3, 4, 6, 12])
def test_ulysses_equals_whole_bit_by_bit(degree: int, dtype: torch.dtype) -> None:
    option = PlacementOption(ParallelConfig(1, degree, 1), tuple(range(degree)))
    split = Mix(degree, (67, 5, 1, 130), (option,) * 4, dim=16, dtype=dtype)
    alone = replace(split, options=tuple(whole(i % degree) for i in range(4)))
    for a, b in zip(split.gather(on_threads(split)[0]), alone.gather(on_threads(alone)[0]), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_repeated_runs_are_equal_bit_by_bit() -> None:
    mix = random_mix(random.Random(99), 6, 12)
    first, second = on_threads(mix)[0], on_threads(mix)[0]
    assert all(
        torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


def test_strided_inputs() -> None:
    """q, k, v as views of one packed projection, with the heads and the head dim in either order."""
    mix = Mix(2, (33, 6, 9, 5), (on_ranks(0, 1, h=2), on_ranks(0, 1, q=2), on_ranks(0, 1, k=2), whole(1)))

    def work(rank: int) -> list[Result]:
        engine = make_engine(mix.rank_sets)
        engine.install(mix.schedule(rank))
        results = []
        for order in ((1, 2, 0, 3), (1, 3, 2, 0)):  # [T, H, 3, D] and [T, D, H, 3]
            *qkv, dout = mix.local(rank)
            packed = torch.stack(qkv).permute(order).contiguous().requires_grad_()
            q, k, v = packed.permute([order.index(i) for i in range(4)])
            out = engine(q, k, v)
            out.backward(dout.transpose(0, 2).contiguous().transpose(0, 2))
            assert packed.grad is not None
            dq, dk, dv = packed.grad.permute([order.index(i) for i in range(4)])
            results.append((out.detach(), dq, dk, dv))
        return results

    for results in zip(*run_threads(work, 2), strict=True):
        assert_exact(mix, list(results), 1e-13)


def test_as_many_tokens_as_heads() -> None:
    """Where the two axes have one size, a transposition goes unnoticed by shapes."""
    mix = Mix(2, (12, 12), (on_ranks(0, 1, q=2), on_ranks(0, 1, k=2)), heads=12, dim=12)
    assert_exact(mix, on_threads(mix)[0], 1e-13)


@pytest.mark.parametrize("world", [2, 4])
def test_on_processes(world: int) -> None:
    rng = random.Random(world)
    mixes = [every_configuration(world, heads, dtype) for heads in (3, 6, 12) for dtype in DTYPES[:3]]
    drawn = [random_mix(rng, world, rng.randint(10, 20)) for _ in range(3)]
    mixes += [replace(mix, dtype=dtype) for mix in drawn for dtype in DTYPES[:3]]
    by_mix = zip(*run_distributed(on_processes, world, mixes), strict=True)
    for mix, of_ranks in zip(mixes, by_mix, strict=True):
        results = [tuple(torch.from_numpy(x).to(mix.dtype) for x in arrays) for arrays in of_ranks]
        assert_within(mix, results)  # type: ignore[arg-type]


def test_the_backward_of_an_earlier_batch_uses_its_own_schedule() -> None:
    first = Mix(2, (11,), (on_ranks(0, 1, h=2),))
    second = Mix(2, (5, 8), (whole(0), on_ranks(0, 1, k=2)), seed=1)

    def work(rank: int) -> list[Result]:
        engine = make_engine(first.rank_sets)
        calls = []
        for mix in (first, second):
            engine.install(mix.schedule(rank))
            *qkv, dout = mix.local(rank)
            qkv = [x.clone().requires_grad_() for x in qkv]
            calls.append((engine(*qkv), qkv, dout))
        engine.uninstall()
        return [(out.detach(), *torch.autograd.grad(out, qkv, dout)) for out, qkv, dout in reversed(calls)]

    later, earlier = zip(*run_threads(work, 2), strict=True)
    assert_exact(first, list(earlier), 1e-13)
    assert_exact(second, list(later), 1e-13)


def test_the_schedule_of_a_late_backward_must_still_be_known() -> None:
    engine = CoalescedAttentionEngine(max_schedules=2)
    mix = Mix(1, (4,), (whole(0),))
    with pytest.raises(EngineError, match="no schedule is installed"):
        engine(*mix.local(0)[:3])
    engine.install(mix.schedule(0))
    q = mix.local(0)[0].requires_grad_()
    out = engine(q, q, q)
    for _ in range(2):
        engine.install(mix.schedule(0))
    with pytest.raises(EngineError, match="is gone: more than 2"):
        out.sum().backward()


def test_wrong_calls_are_refused_before_any_exchange() -> None:
    mix = Mix(2, (5, 6), (on_ranks(0, 1, h=2), on_ranks(0, 1, k=2)), heads=4)

    def work(rank: int) -> dict[str, int]:
        engine = make_engine(mix.rank_sets)
        engine.install(mix.schedule(rank))
        q = mix.local(rank)[0]
        with pytest.raises(EngineError, match=f"planned to hold {len(q)} tokens"):
            engine(q[1:], q[1:], q[1:])
        with pytest.raises(EngineError, match="repeat grouped"):
            engine(q, q[:, :2], q[:, :2])
        with pytest.raises(EngineError, match="one floating dtype"):
            engine(q, q.float(), q)
        with pytest.raises(EngineError, match=r"legal head degrees of this model are \[1, 3\]"):
            engine(q[:, :3], q[:, :3], q[:, :3])
        return dict(engine.counters.exchanges)

    assert run_threads(work, 2) == [{}, {}]


def test_a_split_sequence_needs_process_groups() -> None:
    mix = Mix(2, (4,), (on_ranks(0, 1, h=2),))
    with pytest.raises(EngineError, match="without process groups"):
        CoalescedAttentionEngine().install(mix.schedule(0))
