"""Process groups: bounded, reused, each with a timeout; a peer that is late or gone is named in time."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import run_distributed, run_outcomes
from tests.engine.mixes import Mix, attend, make_engine
from tests.engine.threads import run_threads
from zellige_lightning.engine import ProcessGroupCache
from zellige_lightning.errors import CollectiveError, ConfigError, EngineError
from zellige_lightning.placement import ParallelConfig, PlacementOption, whole

SETS = {(0, 1), (2, 3), (1, 2), (0, 3), (0, 2), (1, 3), (0, 1, 2), (1, 2, 3), (0, 1, 2, 3)}


def changing_mix(rng: random.Random) -> Mix:
    """A few short sequences on rank sets that change with every call."""
    options = []
    for ranks in rng.sample(sorted(SETS), 3):
        axes = [1, 1, 1]
        axes[rng.randrange(3)] = len(ranks)
        options.append(PlacementOption(ParallelConfig(*axes), ranks))
    options.append(whole(rng.randrange(4)))
    lengths = tuple(rng.randint(1, 9) for _ in options)
    return Mix(4, lengths, tuple(options), dim=2, seed=rng.getrandbits(20))


def resources() -> dict[str, int]:
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def run_changing_plans(rank: int, steps: int) -> tuple[dict[str, int], dict[str, int], int]:
    """Resources early and late in a run, and the number of distinct rank sets used."""
    rng, engine, used = random.Random(0), make_engine(SETS), set()
    early: dict[str, int] = {}
    for step in range(steps):
        mix = changing_mix(rng)
        attend(engine, mix, rank)
        used |= mix.rank_sets
        if step == 9:
            early = resources()
    return early, resources(), len(used)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what /proc tells")
def test_two_hundred_changing_plans_use_what_was_made_at_set_up() -> None:
    for rank, (early, late, distinct) in enumerate(run_distributed(run_changing_plans, 4, 200)):
        assert distinct >= 7
        assert early == late
        assert late["groups"] == 1 + sum(rank in ranks for ranks in SETS)  # the world and its own sets


def test_every_group_gets_the_timeout_and_none_is_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[list[int], dict[str, Any]]] = []
    warmed: list[object] = []

    def new_group(ranks: list[int], **kwargs: Any) -> object:
        made.append((ranks, kwargs))
        return tuple(ranks)

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: warmed.append(group))
    cache = ProcessGroupCache(timedelta(seconds=7))
    cache.prepare([(0,), (1, 2), (0, 2), (2,), (0, 1, 2), (0, 2)])
    # one order on all ranks, whatever the order of the sets: large ones first
    assert [ranks for ranks, _ in made] == [[0, 1, 2], [0, 2], [1, 2]]
    assert all(kwargs == {"timeout": timedelta(seconds=7)} for _, kwargs in made)
    assert warmed == [(0, 1, 2), (0, 2)]  # what this rank is in takes its memory now
    cache.prepare([(0, 2), (0, 1)])
    assert [ranks for ranks, _ in made[3:]] == [[0, 1]]
    assert len(cache) == 4
    assert cache.rank_sets == {(0, 1, 2), (0, 2), (1, 2), (0, 1)}


def make_and_close(rank: int) -> tuple[list[list[int]], int]:
    """Members of the groups of this rank, and how many groups are left in the end."""
    cache = ProcessGroupCache(timedelta(seconds=7))
    cache.prepare([(0, 1), (1, 2), (0, 1, 2)])
    mine = [ranks for ranks in sorted(cache.rank_sets) if rank in ranks]
    members = [dist.get_process_group_ranks(cache.get(ranks)) for ranks in mine]
    cache.close()
    assert len(cache) == 0
    return members, len(dist.distributed_c10d._world.pg_map)


def test_groups_have_the_members_asked_for_until_they_are_closed() -> None:
    members, left = zip(*run_distributed(make_and_close, 3), strict=True)
    assert members == ([[0, 1], [0, 1, 2]], [[0, 1], [0, 1, 2], [1, 2]], [[0, 1, 2], [1, 2]])
    assert left == (1, 1, 1)


def rank_sets_that_make_no_sense(rank: int) -> list[str]:
    cache, said = ProcessGroupCache(timedelta(seconds=7)), []
    for ranks in ((0, 1, 1), (1, 0), (0, 2), (-1, 0)):
        with pytest.raises(EngineError) as caught:
            cache.prepare([(0, 1), ranks])
        said.append(str(caught.value))
    assert len(cache) == 0  # nothing was begun that another rank would have to join
    return said


def test_rank_sets_that_make_no_sense_are_refused_on_every_rank() -> None:
    for said in run_threads(rank_sets_that_make_no_sense, 2):
        assert "rank set (0, 1, 1) in a world of 2 ranks" in said[0]
        assert "names no rank twice" in said[2]


def test_a_block_of_which_a_rank_is_no_member_is_refused() -> None:
    mix = Mix(3, (6,), (PlacementOption(ParallelConfig(1, 1, 2), (0, 2)),))

    def work(rank: int) -> str:
        engine = make_engine({(0, 2)})
        if rank != 1:
            return ""
        with pytest.raises(EngineError, match="sequence 0 split .* over ranks \\(0, 2\\)") as caught:
            engine.install(replace(mix.schedule(0), rank=1))
        return str(caught.value)

    assert "rank 1 is to run" in run_threads(work, 3)[1]


@pytest.mark.parametrize(("bound", "made"), [(1, 1), (2, 2), (3, 4), (9, 9)])
def test_the_largest_sets_get_groups_until_a_rank_has_enough(bound: int, made: int) -> None:
    """The parent counts; here it is the set of all ranks."""

    def work(rank: int) -> tuple[frozenset[tuple[int, ...]], int, str]:
        cache = ProcessGroupCache(timedelta(seconds=7), transport="auto", max_communicators=bound)
        cache.prepare(sorted(SETS, reverse=rank % 2 == 0))  # in whatever order
        return cache.rank_sets, cache.communicators, str(cache)

    results = run_threads(work, 4)
    assert len(set(results)) == 1
    sets, communicators, said = results[0]
    assert len(sets) == made
    assert (0, 1, 2, 3) in sets and communicators <= bound
    assert said.startswith(f"{made} process groups, at most {communicators} on one rank")
    assert ("over the group of all ranks" in said) == (made < len(SETS))


def test_groups_of_their_own_do_not_exceed_the_bound() -> None:
    def work(rank: int) -> None:
        cache = ProcessGroupCache(timedelta(seconds=7), transport="groups", max_communicators=1)
        with pytest.raises(ConfigError, match="more than 1 process groups on one rank"):
            cache.prepare(SETS)

    run_threads(work, 4)


def test_a_rank_set_outside_the_family_is_named() -> None:
    mix = Mix(3, (6,), (PlacementOption(ParallelConfig(1, 1, 2), (0, 2)),))

    def work(rank: int) -> None:
        engine = make_engine({(0, 1, 2), (0, 1)})
        if rank == 1:
            attend(engine, mix, rank)  # an idle rank has nothing to complain about
        else:
            with pytest.raises(EngineError, match=r"rank set \(0, 2\).*\n.*planner\.family"):
                attend(engine, mix, rank)

    run_threads(work, 3)


TIMEOUT_S, GRACE_S = 2.0, 2.0


def meet_a_failed_peer(rank: int, failure: str, phase: str, transport: str) -> tuple[str, str, float]:
    """(error type, message, seconds until it came) on the ranks that wait for rank 1."""
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=60))
    options = (
        PlacementOption(ParallelConfig(1, 1, 3), (0, 1, 2)),
        PlacementOption(ParallelConfig(1, 2, 1), (0, 1)),
    )
    mix = Mix(3, (30, 8), options)
    engine = make_engine(mix.rank_sets, TIMEOUT_S, transport)
    engine.observer.step = 5
    engine.install(mix.schedule(rank))
    q, k, v, dout = mix.local(rank)
    engine(q, k, v)  # the first layer
    out = engine(q.requires_grad_(), k, v) if phase == "backward" else q
    if rank == 1:
        if failure == "dies":
            os._exit(9)
        time.sleep(TIMEOUT_S + GRACE_S + 0.5)
    start = time.monotonic()
    try:
        out.backward(dout) if phase == "backward" else engine(q, k, v)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("failure", ["sleeps", "dies"])
@pytest.mark.parametrize("transport", ["groups", "parent"])
def test_a_failed_peer_is_reported_in_time(transport: str, failure: str, phase: str) -> None:
    outcomes = run_outcomes(meet_a_failed_peer, 3, failure, phase, transport, group=False)
    for outcome in (outcomes[0], outcomes[2]):
        kind, message, elapsed_s = outcome.value
        assert kind == CollectiveError.__name__
        assert f"ring exchange in the {phase} of sequence 0 split (1,1,3) over ranks (0, 1, 2)" in message
        assert message.startswith("[step 5] ") and f"({phase}, layer 1)" in message
        assert elapsed_s < TIMEOUT_S + GRACE_S
