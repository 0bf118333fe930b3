"""From measured steps to the next prices: the cause is found (rank, bucket, everything), a spike or noise is
none, and a change is made only where it lowers the error."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.planner.toys import BUCKETS, table
from zellige_lightning.errors import ProfileError
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.correction import PriceCorrection, factor_of
from zellige_lightning.planner.cost import PriceKey
from zellige_lightning.planner.repricing import describe, neutral, reprice
from zellige_lightning.planner.residuals import Observation, find_causes

WHOLE, PAIR = ParallelConfig(), ParallelConfig(1, 2, 1)
PRICES = {"image": 300, "short": 1200, "long": 4000}
FIXED_US, NONE = 500, PriceCorrection()


def step(
    number: int,
    world: int,
    rng: random.Random,
    slow: Mapping[int, float] | None = None,
    dear: Mapping[str, float] | None = None,
    spike: float = 1.0,
    noise: float = 0.01,
) -> Observation:
    """A random placement on a machine where some ranks are slow and some buckets dear."""
    slow, dear = slow or {}, dear or {}
    cells: dict[tuple[PriceKey, tuple[int, ...]], int] = {}
    for name, most in (("image", 12), ("short", 4), ("long", 2)):
        for _ in range(rng.randint(0, most) * world // 2):
            first = rng.randrange(0, world, 2)
            is_split = name == "long" and rng.random() < 0.5
            ranks = (first, first + 1) if is_split else (rng.randrange(world),)
            key = name, PAIR if is_split else WHOLE, "node"
            cells[key, ranks] = cells.get((key, ranks), 0) + (2100 if is_split else PRICES[name])
    measured = []
    for rank in range(world):
        time = FIXED_US * slow.get(rank, 1.0)
        for (key, ranks), us in cells.items():
            time += us * dear.get(key[0], 1.0) * max(slow.get(r, 1.0) for r in ranks) * (rank in ranks)
        measured.append(int(time * spike * rng.lognormvariate(0, noise)))
    rows = tuple((key, ranks, us) for (key, ranks), us in cells.items())
    return Observation(number, rows, (FIXED_US,) * world, tuple(measured), 1, max(measured))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_noise_and_a_spike_are_no_reason_to_change(world: int, noise: float) -> None:
    for seed in range(8):
        rng = random.Random(seed)
        when = rng.randrange(16)
        found = reprice(
            [step(i, world, rng, noise=noise, spike=10.0 ** (i == when)) for i in range(16)], NONE
        )
        assert replace(found, noise=0) == NONE
        assert 10 <= found.noise <= 50


def test_much_noise_over_a_long_run_hardly_ever_changes_a_price() -> None:
    """One of many factors always seems to help a little: what chance alone would gain does not count."""
    changes = 0
    for seed in range(6):
        rng, observations, present = random.Random(seed), [], NONE
        for number in range(120):
            observations = [*observations[-47:], step(number, 2, rng, noise=0.15)]
            if number > 12 and number % 4 == 0:
                found = reprice(observations, present)
                changes += replace(found, noise=0) != replace(present, noise=0)
                present = found
    assert changes <= 4, "of 162 decisions"


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("factor", [0.7, 1.5, 3.0])
def test_what_follows_the_rank_is_the_rank(world: int, factor: float) -> None:
    rng = random.Random(world)
    found = reprice([step(i, world, rng, {world - 1: factor}) for i in range(16)], NONE)
    assert not found.buckets and not found.keys
    if world > 2 or factor > 1:  # of two ranks, the faster one is the ordinary one
        assert factor_of(found.ranks[-1]) == pytest.approx(factor, rel=0.05)
        assert not any(found.ranks[:-1]) and found.overall == 0
    straggles = [line for line in describe(NONE, found) if line.startswith(f"straggler rank {world - 1}:")]
    assert len(straggles) == (factor > 1)


@pytest.mark.parametrize("world", [2, 4])
def test_what_follows_the_bucket_is_the_model(world: int) -> None:
    rng = random.Random(5)
    found = reprice([step(i, world, rng, dear={"long": 1.3}) for i in range(20)], NONE)
    assert not found.ranks and found.overall == 0
    levels = dict(found.buckets)
    assert set(levels) == {"long"} and factor_of(levels["long"]) == pytest.approx(1.3, rel=0.05)
    (line,) = describe(NONE, found)
    assert line.startswith("model drift: bucket long takes 1.")


def test_both_at_once_are_told_apart() -> None:
    rng = random.Random(2)
    found = reprice([step(i, 4, rng, {2: 1.5}, {"short": 1.4}) for i in range(20)], NONE)
    assert dict(found.buckets).keys() == {"short"} and [n > 4 for n in found.ranks] == [0, 0, 1, 0]


def test_what_all_have_in_common_is_no_cause_of_any() -> None:
    rng = random.Random(1)
    found = reprice([step(i, 2, rng, {0: 1.4, 1: 1.4}) for i in range(16)], NONE)
    assert (found.buckets, found.keys, found.ranks) == ((), (), ()) and found.overall == 7
    assert describe(NONE, found) == ["model drift: all prices are 1.41 times the profile's"]
    assert describe(NONE, replace(found, overall=20))[0].endswith("(`strategy.request_profile()`)")


def test_a_change_shows_after_a_few_steps_and_goes_as_it_came() -> None:
    rng, slow = random.Random(4), PriceCorrection()
    steps = [step(i, 4, rng, {1: 1.5} if i >= 12 else {}) for i in range(24)]
    known = [reprice(steps[:n], NONE).ranks for n in range(12, 25)]
    assert known[0] == () and known[8] == (0, 8, 0, 0)
    slow = PriceCorrection(ranks=(0, 8, 0, 0))
    well = [step(i, 4, rng) for i in range(16)]
    again = reprice(well, slow)
    assert again.ranks == () and describe(slow, again) == ["rank 1 is no straggler any more"]


def test_a_level_stays_until_the_estimate_is_clearly_another() -> None:
    rng = random.Random(9)
    present = PriceCorrection(ranks=(0, 8, 0, 0), noise=10)
    assert reprice([step(i, 4, rng, {1: 1.51}) for i in range(16)], present) == present


def test_rare_shapes_are_not_judged() -> None:
    rng = random.Random(6)
    steps = [step(i, 2, rng) for i in range(16)]
    rare = ("odd", WHOLE, "node")
    seen = [replace(s, cells=(*s.cells, (rare, (0,), 900))) if s.step in (3, 9) else s for s in steps]
    assert find_causes(seen).buckets["odd"] == pytest.approx(0.0, abs=1e-2)


def test_many_ranks_at_once() -> None:
    rng = random.Random(3)
    found = find_causes([step(i, 256, rng, {17: 1.5}) for i in range(5)])
    assert max(range(256), key=lambda r: found.ranks[r]) == 17
    assert found.ranks[17] == pytest.approx(0.405, abs=0.06)


def test_corrections_travel_as_text() -> None:
    key = ("v480", PAIR, "node")
    correction = PriceCorrection(2, (("v480", -3),), ((key, 4),), (0, 8), 30)
    assert PriceCorrection.from_json(correction.to_json()) == correction
    assert correction.version != PriceCorrection(2).version != NONE.version == "0"
    for text in (
        "",
        "[]",
        "{}",
        "[0,[],[],[1e400],0]",
        "[0,[[1,2]],[],[],0]",
        "[0,[],[],[true],0]",
        "[9e9,[],[],[],0]",
    ):
        with pytest.raises(ProfileError, match="price correction"):
            PriceCorrection.from_json(text)
    assert neutral(correction) == PriceCorrection(ranks=(0, 8), noise=30)
    assert json.loads(correction.to_json())[0] == 2


def test_corrected_tables_scale_what_they_name() -> None:
    start = (PAIR, "node")
    measured = replace(table(4), start_us={start: 900})
    key = ("v480", PAIR, "node")
    corrected = PriceCorrection(0, (("i256", 5),), ((key, 2),)).apply(measured)
    changed = {k for k, price in corrected.prices_us.items() if price != measured.prices_us[k]}
    assert changed == {key} | {k for k in measured.prices_us if k[0] == "i256"}
    assert corrected.prices_us[key] == round(measured.prices_us[key] * 1.05**2)
    assert NONE.apply(measured) is measured and corrected.version != measured.version
    everything = PriceCorrection(7).apply(measured)
    assert everything.fixed_us == round(measured.fixed_us * 1.05**7)
    assert (everything.start_us[start], corrected.start_us[start]) == (round(900 * 1.05**7), 900)
    assert everything.whole_us(BUCKETS["v720"]) == pytest.approx(
        1.407 * measured.whole_us(BUCKETS["v720"]), rel=1e-2
    )
