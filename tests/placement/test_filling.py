"""Whole sequences in the gaps between exchanges."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from tests.placement.test_schedule import placements
from zellige_lightning.placement.filling import fill_gaps, work_between_pauses
from zellige_lightning.placement.plan import WHOLE, Filling, ParallelConfig, PlacementOption, Plan, whole
from zellige_lightning.placement.schedule import END, PASSES, build_schedule, whole_pieces
from zellige_lightning.placement.sequence import Bucket, GlobalBatch
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.cost import ProfileTable
from zellige_lightning.planner.filling import filling_of

PAIR = ParallelConfig(1, 2, 1)


@settings(max_examples=80, deadline=None)
@given(placements(), st.integers(0, 1 << 30))
def test_every_whole_sequence_runs_once_in_buffer_order(
    made: tuple[int, list[PlacementOption], list[int]], seed: int
) -> None:
    world, options, lengths = made
    rng = random.Random(seed)
    attention = [rng.choice([1.0, 5.0, 100.0]) for _ in options]
    overhead = [0.0 if o.config.is_whole else rng.choice([0.0, 20.0]) for o in options]
    fillings = fill_gaps(options, attention, overhead, world)
    assert len(fillings) == world
    for rank, filling in enumerate(fillings):
        schedule = build_schedule(options, lengths, rank, world, filling)
        pack = [b for b in schedule.blocks if b.config.is_whole]
        split = [b.config for b in schedule.blocks if not b.config.is_whole]
        for which in PASSES:
            pieces = list(whole_pieces(schedule, which))
            assert [s for _, b in pieces for s in b.segments] == [s for b in pack for s in b.segments]
            assert [p.start for _, p in pieces[1:]] == [p.stop for _, p in pieces[:-1]]
            pauses = [pause for pause, _ in pieces if pause != END]
            num_pauses = sum(len(work_between_pauses(config, which)) - 1 for config in split)
            assert pauses == sorted(set(pauses)) and all(pause < num_pauses for pause in pauses)


def test_a_rank_fills_the_time_that_a_peer_is_late() -> None:
    """Ranks 0 and 1 share a long sequence before rank 1 and 2 share one: rank 2 has time for four of its six
    sequences until rank 1 comes, and the others wait for nobody."""
    options = [PlacementOption(PAIR, (0, 1)), PlacementOption(PAIR, (1, 2))]
    options += [whole(2)] * 6 + [whole(0)]
    attention = [80.0, 80.0, *[10.0] * 7]
    fillings = fill_gaps(options, attention, [0.0] * len(options), 3)
    # the first pause of a Ulysses block is its head exchange, for which rank 1 comes late
    assert fillings[2] == Filling(((0, 4),), ((0, 4),))
    assert fillings[0] == Filling() and fillings[1] == Filling()


def test_an_exchange_that_takes_time_is_filled() -> None:
    options = [PlacementOption(PAIR, (0, 1)), *[whole(0)] * 4]
    (filling, other) = fill_gaps(options, [100.0, *[5.0] * 4], [40.0, *[0.0] * 4], 2)
    assert filling.forward[0][0] == 0 and sum(count for _, count in filling.forward) == 4
    assert other == Filling()


def test_a_sequence_much_longer_than_the_gap_waits() -> None:
    options = [PlacementOption(PAIR, (0, 1)), whole(0)]
    short, long = (fill_gaps(options, [10.0, length], [4.0, 0.0], 2)[0] for length in (1.0, 1000.0))
    assert short.forward and not long.forward


@pytest.mark.parametrize("which", PASSES)
def test_work_is_divided_completely(which: str) -> None:
    for config in (PAIR, ParallelConfig(2, 1, 1), ParallelConfig(1, 1, 5), ParallelConfig(2, 3, 2)):
        assert sum(work_between_pauses(config, which)) == pytest.approx(1.0)


def test_the_start_of_a_call_is_filled_too() -> None:
    """Exchanges that cost nothing beside shares: only a start leaves time for whole sequences."""
    prices = {("long", WHOLE, "node"): 10_000, ("short", WHOLE, "node"): 100, ("long", PAIR, "node"): 5_000}
    buckets = Bucket("long", (4, 100, 100)), Bucket("short", (1, 100, 100))
    batch = GlobalBatch.of(0, 0, [("a", buckets[0]), *[(f"{i}", buckets[1]) for i in range(8)]])
    options = (PlacementOption(PAIR, (0, 1)), *[whole(0)] * 4, *[whole(1)] * 4)
    plan, topology = Plan(0, 2, options, (0, 0), (0, 0)), Topology.uniform(2)
    without = ProfileTable(buckets, prices, {}, 0, {})
    started = replace(without, start_us={(PAIR, "node"): 2_000})
    assert not any(f.forward or f.backward for f in filling_of(plan, batch, without, topology))
    found = filling_of(plan, batch, started, topology)
    assert all(f.forward and f.backward for f in found)
    hidden = replace(started, start_us={(PAIR, "node"): 200}, overhead_scale=0.1)
    assert filling_of(plan, batch, hidden, topology) == found, "what was hidden is there to be hidden again"
