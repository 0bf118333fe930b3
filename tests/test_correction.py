"""The prices of a run: when they change, from which batch on, and what a checkpoint keeps of them."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.planner.test_repricing import step
from tests.planner.toys import batch, planner, table
from zellige_lightning.agreement import Agreement
from zellige_lightning.correction import OnlinePrices, observation_of, precedent_in, saved
from zellige_lightning.errors import PlanningError, ZelligeError
from zellige_lightning.placement.plan import ParallelConfig, PlacementOption
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.correction import PriceCorrection
from zellige_lightning.planner.precedent import Precedent
from zellige_lightning.planner.residuals import Observation

WARMUP, AHEAD = 6, 3


def prices(warmup: int | None = WARMUP, fixed_us: int = 500, world: int = 2) -> OnlinePrices:
    topology = Topology.uniform(world)
    return OnlinePrices(table(world, fixed_us=fixed_us), topology, Agreement(timedelta(seconds=5)), warmup)


def observed(number: int, rng: random.Random, slow: float, error: float = 0.0) -> Observation:
    """A step whose makespan was predicted with a relative error."""
    made = step(number, 2, rng, {1: slow})
    predicted = int(made.makespan_us * (1 + error))
    return Observation(number, made.cells, made.rest_us, made.measured_us, predicted, made.makespan_us)


def run(given: OnlinePrices, first: int, last: int, slow: float = 1.5) -> list[str]:
    lines = []
    for number in range(first, last):
        lines += given.observe(observed(number, random.Random(number), slow), number + 1 + AHEAD)
    return lines


def test_prices_change_from_the_first_batch_that_nobody_was_asked_for() -> None:
    given = prices()
    assert run(given, 0, WARMUP + 1) == []
    (straggler, head) = run(given, WARMUP + 1, WARMUP + 2)
    first = WARMUP + 2 + AHEAD
    assert straggler.startswith("straggler rank 1: takes 1.") and head.endswith(f"from step {first} on")
    assert given.at(first - 1).correction == PriceCorrection()
    assert given.at(first).correction.ranks[1] > 0 == given.at(first).correction.ranks[0]
    run(given, WARMUP + 2, first + 12)
    assert given.at(first + 12).correction.ranks == given.at(first).correction.ranks
    assert given.num_changes <= 2  # the noise may have been settled since


def test_off_never_looks() -> None:
    given = prices(None)
    assert run(given, 0, 40) == [] and given.state() == {} and given.at(40).correction == PriceCorrection()


def test_a_jump_alarms_and_a_spike_does_not() -> None:
    given, lines = prices(), []
    for number in range(40):
        error = 0.3 if number == 12 or number >= 25 else 0.01
        more = given.observe(observed(number, random.Random(number), 1.0, error), number + 2)
        lines += [(number, line) for line in more if "alarm" in line]
    ((when, line),) = lines
    assert 26 <= when <= 28 and "makespan error 29.9 %, before 0.9 %" in line


def test_a_restored_run_decides_the_same() -> None:
    full, part = prices(), prices()
    lines = run(full, 0, 30)
    before = run(part, 0, 11)
    resumed = prices()
    assert resumed.restore(json.loads(json.dumps(part.state()))) == ""
    assert resumed.state() == part.state()
    assert before + run(resumed, 11, 30) == lines
    assert resumed.state() == full.state()
    assert [resumed.at(n) for n in range(11, 34)] == [full.at(n) for n in range(11, 34)]


def test_another_profile_or_world_starts_anew() -> None:
    given = prices()
    run(given, 0, 12)
    assert "another profile" in prices(fixed_us=501).restore(given.state())
    assert "another world size" in prices().restore({**given.state(), "world_size": 3})
    assert prices().restore({}) == ""


@pytest.mark.parametrize(
    "damage",
    [
        {"versions": None},
        {"versions": [[0, "{"]]},
        {"versions": [["x", "[0,[],[],[],0]"]]},
        {"window": [[1, 2]]},
        {"window": [[1, [[["a", [0, 1, 1], "node"], [0], 5]], [1], [1], [1, 1]]]},
        {"counters": [1]},
    ],
)
def test_a_damaged_state_is_an_error_that_says_so(damage: dict[str, Any]) -> None:
    given = prices()
    run(given, 0, 12)
    with pytest.raises(ZelligeError):
        prices().restore({**given.state(), **damage})


def test_the_previous_plan_is_kept_with_its_digest() -> None:
    what = batch({"v480": 2, "i256": 20})
    past = Precedent.of([(what, planner(2, name="exact").plan(what))])
    given = prices()
    assert saved(given, past) == {} and precedent_in({}) == Precedent()
    run(given, 0, 3)
    state = json.loads(json.dumps(saved(given, past)))
    assert precedent_in(state) == past
    with pytest.raises(ZelligeError, match="digest"):
        precedent_in({**state, "previous_digest": 1})
    with pytest.raises(PlanningError):
        precedent_in({**state, "previous_plan": "[[1]]"})


def test_measuring_again_keeps_slow_ranks_alone() -> None:
    given = prices()
    run(given, 0, 12)
    ranks = given.at(99).correction.ranks
    given.remeasured(table(2, fixed_us=900), 20)
    assert given.at(19).table.fixed_us == 500 and given.at(20).table.fixed_us == 900
    assert given.at(20).correction.ranks == ranks != ()


def test_expected_times_are_those_of_the_plan() -> None:
    """Cells and rest together are the predicted loads, whatever the correction."""
    what, made, given = batch({"v480": 3, "i256": 20}), planner(2, name="exact"), prices()
    run(given, 0, 20)
    version = given.at(99)
    assert version.correction.slowness
    made.use(version.table, version.correction, Precedent())
    plan = made.plan(what)
    expectation = given.expect(99, [(what, plan)])
    slowness = version.correction.slowness
    loads = [0.0, 0.0]
    for _, ranks, us in expectation.cells:
        for rank in ranks:
            loads[rank] += us * max(slowness[r] for r in ranks) / 1000
    assert loads == pytest.approx(list(plan.loads_us), rel=1e-2)
    assert expectation.rest_us == (500, 500)
    started = replace(version.table, start_us={(ParallelConfig(1, 2, 1), "node"): 900})
    other = OnlinePrices(started, Topology.uniform(2), Agreement(timedelta(seconds=5)), WARMUP)
    split = replace(plan, options=(PlacementOption(ParallelConfig(1, 2, 1), (0, 1)),) * len(plan.options))
    assert other.expect(0, [(what, split)]).rest_us == (1400, 1400)
    seen = observation_of(99, expectation, [(1000, 700), (1010, 900)], 1, 1010)
    assert seen.measured_us == (810, 1010)
