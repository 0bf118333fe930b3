"""Over the group of all ranks, point to point, everything is as over a group for each rank set."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed
from tests.engine.mixes import Mix, attend, degrees, make_engine, random_mix
from tests.engine.test_faults import LateTransport
from zellige_lightning.engine import CoalescedAttentionEngine
from zellige_lightning.placement import ParallelConfig, PlacementOption, whole


def on_both(rank: int, mixes: list[Mix], late: bool) -> dict[str, float]:
    """How many results differ from those over groups, the largest error, and the parent's groups."""
    sets = set().union(*(mix.rank_sets for mix in mixes))
    engines = [make_engine(sets), make_engine(sets, transport="parent")]
    made = [len(groups_of(engine)) for engine in engines]
    if late:
        assert engines[1]._transport is not None
        engines[1]._transport.__class__ = LateTransport
    different, worst = 0, 0.0
    for mix in mixes:
        own, parent = (attend(engine, mix, rank) for engine in engines)
        different += sum(not torch.equal(a, b) for a, b in zip(own, parent, strict=True))
        worst = max(worst, mix.worst_error(rank, parent))
    counted = [engine.counters for engine in engines]
    assert counted[0] == counted[1] and sum(counted[1].exchanges.values())
    return {"different": different, "worst": worst, "made": made[1]}


def groups_of(engine: CoalescedAttentionEngine) -> frozenset[tuple[int, ...]]:
    assert engine._transport is not None
    return engine._transport._groups.rank_sets


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_parent_gives_the_same_bits(world: int, late: bool) -> None:
    rng = random.Random(world)
    every = tuple(PlacementOption(c, tuple(range(c.degree))) for c in degrees(world))
    mixes = [
        Mix(world, tuple(rng.choice([1, 3, 40, 61]) for _ in every), every),
        *(random_mix(rng, world, 12) for _ in range(3)),
    ]
    for result in run_distributed(on_both, world, mixes, late):
        assert result["different"] == 0
        assert result["worst"] <= 1e-13
        assert result["made"] == 1


def one_set_over_the_parent(rank: int, mix: Mix) -> tuple[float, int]:
    engine = make_engine({(0, 1)}, transport="auto")
    before = len(dist.distributed_c10d._world.pg_map)
    error = mix.worst_error(rank, attend(engine, mix, rank))
    assert len(dist.distributed_c10d._world.pg_map) == before  # nothing was made for it
    return error, len(groups_of(engine))


def test_a_set_without_a_group_joins_those_with_one() -> None:
    """Rank 2 is outside of the one and inside of the other; rank 3 takes part in nothing."""
    options = (
        PlacementOption(ParallelConfig(1, 2, 1), (0, 1)),
        PlacementOption(ParallelConfig(1, 1, 3), (0, 1, 2)),
        PlacementOption(ParallelConfig(2, 1, 1), (1, 2)),
        whole(2),
    )
    for error, groups in run_distributed(one_set_over_the_parent, 4, Mix(4, (33, 20, 9, 7), options)):
        assert error <= 1e-13
        assert groups == 2  # {0, 1} and the parent
