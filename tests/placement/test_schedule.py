"""Invariants of the schedules that all ranks derive from one plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from zellige_lightning.errors import EngineError, PlanningError
from zellige_lightning.placement.plan import ParallelConfig, PlacementOption, whole
from zellige_lightning.placement.schedule import RankSchedule, build_schedule, shard


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, list[PlacementOption], list[int]]:
    """(world, one option per sequence, lengths); rank sets overlap freely."""
    world = draw(st.integers(1, 64))
    options, lengths = [], []
    for _ in range(draw(st.integers(0, 20))):
        h = draw(st.sampled_from([1, 1, 2, 3, 4]))
        q, k = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (2, 3)]))
        config = ParallelConfig(q, h, k) if q * h * k <= world else ParallelConfig()
        ranks = draw(st.permutations(range(world)))[: config.degree]
        options.append(PlacementOption(config, tuple(sorted(ranks))))
        lengths.append(draw(st.integers(1, 40)))
    return world, options, lengths


def schedules(world: int, options: list[PlacementOption], lengths: list[int]) -> list[RankSchedule]:
    return [build_schedule(options, lengths, rank, world) for rank in range(world)]


@settings(max_examples=60, deadline=None)
@given(placements())
def test_every_token_is_held_exactly_once(made: tuple[int, list[PlacementOption], list[int]]) -> None:
    world, options, lengths = made
    held: dict[int, list[int]] = {i: [] for i in range(len(options))}
    for schedule in schedules(world, options, lengths):
        for segment in schedule.segments:
            held[segment.sequence] += segment.tokens
    assert {i: sorted(tokens) for i, tokens in held.items()} == {
        i: list(range(n)) for i, n in enumerate(lengths)
    }


@settings(max_examples=60, deadline=None)
@given(placements())
def test_participants_walk_one_global_order(made: tuple[int, list[PlacementOption], list[int]]) -> None:
    world, options, lengths = made
    every = schedules(world, options, lengths)
    walked = [
        [
            (b.config, b.ranks, tuple(s.sequence for s in b.segments))
            for b in s.blocks
            if not b.config.is_whole
        ]
        for s in every
    ]
    for a in range(world):
        for b in range(a + 1, world):  # what two ranks share comes in the same order on both
            shared = set(walked[a]) & set(walked[b])
            assert [x for x in walked[a] if x in shared] == [x for x in walked[b] if x in shared]
    for rank, blocks in enumerate(walked):  # and nobody takes part in a block that another participant lacks
        for block in blocks:
            assert rank in block[1]
            assert all(block in walked[other] for other in block[1])


@settings(max_examples=60, deadline=None)
@given(placements())
def test_buffer_order_is_block_order(made: tuple[int, list[PlacementOption], list[int]]) -> None:
    for schedule in schedules(*made):
        assert [b.order for b in schedule.blocks] == sorted(b.order for b in schedule.blocks)
        start = 0
        for block in schedule.blocks:
            assert block.start == start
            start = block.stop
        assert schedule.num_tokens == start == schedule.offsets[-1]
        assert [schedule.offsets[i + 1] - schedule.offsets[i] for i in range(len(schedule.segments))] == [
            len(s) for s in schedule.segments
        ]


def test_coalescing_by_hand() -> None:
    pair = PlacementOption(ParallelConfig(1, 2, 1), (0, 1))
    ring = PlacementOption(ParallelConfig(1, 1, 2), (0, 1))
    options = [whole(0), pair, ring, pair, whole(0), ring]
    blocks = build_schedule(options, [4, 6, 8, 10, 3, 2], 0, 2).blocks
    # Ulysses of one rank set coalesces, rings do not, whole sequences come last in one call
    assert [[s.sequence for s in b.segments] for b in blocks] == [[1, 3], [2], [5], [0, 4]]
    assert [b.num_tokens for b in blocks] == [8, 4, 1, 7]


def test_shards_are_uneven_and_may_be_empty() -> None:
    assert [len(shard(7, i, 3)) for i in range(3)] == [2, 2, 3]
    lengths = [len(shard(2, i, 4)) for i in range(4)]
    assert (sum(lengths), min(lengths)) == (2, 0)
    spread = PlacementOption(ParallelConfig(1, 4, 1), (0, 1, 2, 3))
    segments = [build_schedule([spread], [2], rank, 4).segments for rank in range(4)]
    assert all(len(s) == 1 for s in segments)  # a rank without tokens still takes part


def test_an_idle_rank_has_an_empty_schedule() -> None:
    schedule = build_schedule([whole(0)], [5], 1, 2)
    assert (schedule.blocks, schedule.num_tokens, schedule.offsets) == ((), 0, (0,))


def test_unsorted_doubled_and_foreign_ranks_are_refused() -> None:
    for ranks in ((1, 0), (0, 0), (-1, 0)):
        with pytest.raises(PlanningError, match="ascending"):
            PlacementOption(ParallelConfig(1, 2, 1), ranks)
    with pytest.raises(PlanningError, match="needs 2 ranks"):
        PlacementOption(ParallelConfig(1, 2, 1), (0, 1, 2))
    with pytest.raises(PlanningError, match="split factors"):
        ParallelConfig(0, 1, 1)
    with pytest.raises(EngineError, match="world of 2"):
        build_schedule([whole(2)], [5], 0, 2)
    with pytest.raises(EngineError, match="0 tokens"):
        build_schedule([whole(0)], [0], 0, 2)
