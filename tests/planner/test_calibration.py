"""Corrections by whole steps: found again where they were put in, and left out where they are not there."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.planner.toys import BUCKETS, table
from zellige_lightning.placement.plan import WHOLE, ParallelConfig, PlacementOption, whole
from zellige_lightning.placement.sequence import Bucket
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.calibration import Observation, Terms, calibrate, held_out_errors
from zellige_lightning.planner.price_fit import PriceFit, fit_all

WORLD = 4
ULYSSES = ParallelConfig(1, 2, 1)
PRICES, TOPOLOGY = replace(table(WORLD), start_us={(ULYSSES, "node"): 800}), Topology.uniform(WORLD)
SPLITS = tuple({key[1] for key in PRICES.prices_us if key[1].degree == 2})


def steps(truth: Terms, count: int = 24, noise: float = 0.0, first: int = 0) -> list[Observation]:
    """Random placements and what they take under `truth`."""
    found = []
    for number in range(first, first + count):
        rng = random.Random(number)
        options, buckets = [], []
        for _ in range(rng.randrange(4, 30)):
            bucket = rng.choice(list(BUCKETS.values()))
            if rng.random() < 0.4:
                start = rng.choice((0, 2))
                options.append(PlacementOption(rng.choice(sorted(SPLITS)), (start, start + 1)))
            else:
                options.append(whole(rng.randrange(WORLD)))
            buckets.append(bucket)
        loads = [truth.fixed_us] * WORLD
        for option, bucket in zip(options, buckets, strict=True):
            price = PRICES.price_us(bucket, option.config, "node")
            assert price is not None
            for rank in option.ranks:
                loads[rank] += truth.price_us(price, PRICES.whole_us(bucket), option.config)
        for option in {option for option in options if option.config == ULYSSES}:  # one call for all of them
            for rank in option.ranks:
                loads[rank] += truth.start_us(800)
        factor = 1.0 + noise * rng.uniform(-1.0, 1.0)
        found.append(Observation(tuple(options), tuple(buckets), factor * max(loads), number))
    return found


@pytest.mark.parametrize(
    ("truth", "model"),
    [
        (Terms(500.0), "plain"),
        (Terms(700.0, 1.05, 1.05, 1.05), "scale"),
        (Terms(700.0, 0.97, 1.12, 1.12), "two scales"),
        (Terms(700.0, 1.02, 1.1, 0.2), "overheads"),
        (Terms(700.0, 1.02, 1.1, 0.05), "overheads"),
        (Terms(600.0, 1.02, 1.02, 1.02, launch_us=300.0), "launches"),
        (Terms(600.0, 1.02, 1.02, 1.02, exchange_us=900.0), "exchanges"),
    ],
)
def test_the_terms_of_a_machine_are_found(truth: Terms, model: str) -> None:
    found = calibrate(PRICES, TOPOLOGY, steps(truth, noise=1e-4))
    assert found.model == model
    assert found.terms.exchange_us == pytest.approx(truth.exchange_us, rel=0.02), "once for each block"
    corrected = found.applied_to(PRICES)
    for name, config in (("v480", ULYSSES), ("v480", ParallelConfig(2, 1, 1)), ("i256", WHOLE)):
        key, whole_us = (name, config, "node"), PRICES.whole_us(BUCKETS[name])
        wanted = truth.price_us(PRICES.prices_us[key], whole_us, config)
        assert corrected.prices_us[key] == pytest.approx(wanted, rel=0.02, abs=30)
    assert corrected.start_us.get((ULYSSES, "node"), 0) == pytest.approx(truth.start_us(800), rel=0.1, abs=20)


def test_corrections_help_on_plans_that_they_have_not_seen() -> None:
    truth = Terms(700.0, 1.04, 1.1, 1.1, exchange_us=200.0)
    errors = held_out_errors(PRICES, TOPOLOGY, steps(truth, noise=0.01), steps(truth, noise=0.01, first=100))
    assert errors["all"][0] < 1.0 < 4.0 < errors["plain"][0]
    assert errors["plain"][1] < -4.0, "without corrections it predicts too little"


def test_a_term_that_only_follows_noise_is_rarely_taken() -> None:
    """With a dozen noisy steps one of six forms is mostly a little better on those left out, by chance. The
    one that is expected is taken more readily."""
    chosen = [
        calibrate(PRICES, TOPOLOGY, steps(Terms(500.0), 12, noise=0.1, first=100 * start)).model
        for start in range(40)
    ]
    assert chosen.count("plain") >= 28 and chosen.count("overheads") <= 8
    assert len(chosen) - chosen.count("plain") - chosen.count("overheads") <= 5


def test_hidden_overhead_needs_less_certainty_than_other_terms() -> None:
    """Asked for as much as the others, it would be found in one of twenty such sets of steps."""
    truth = Terms(700.0, 1.0, 1.05, 0.3)
    chosen = [
        calibrate(PRICES, TOPOLOGY, steps(truth, 12, noise=0.06, first=100 * start)).model
        for start in range(20)
    ]
    assert chosen.count("overheads") >= 4


def test_noise_alone_changes_no_price() -> None:
    found = calibrate(PRICES, TOPOLOGY, steps(Terms(500.0), noise=0.02))
    for key, us in found.applied_to(PRICES).prices_us.items():
        assert us == pytest.approx(PRICES.prices_us[key], rel=0.02, abs=3)


def test_a_machine_that_was_busy_does_not_become_a_fixed_cost() -> None:
    busy = calibrate(PRICES, TOPOLOGY, steps(Terms(5e6))).applied_to(PRICES)
    assert busy.fixed_us <= 3 * PRICES.fixed_us


def test_steps_that_have_nothing_to_do_with_the_prices_change_nothing() -> None:
    found = calibrate(PRICES, TOPOLOGY, steps(Terms(500.0, 9.0, 9.0)))
    assert (found.model, found.applied_to(PRICES)) == ("plain", PRICES)
    assert calibrate(PRICES, TOPOLOGY, []).applied_to(PRICES) == PRICES


def test_a_partial_grid_takes_its_computation_from_whole_sequences() -> None:
    whole_fit = PriceFit(40.0, 0.5, 1e-4)
    config = ParallelConfig(2, 1, 1)
    lengths = (256, 1024, 4096, 16384)
    shared = whole_fit.shared(2)

    def split_us(tokens: int) -> int:
        return shared.price_us(tokens) + round(100 + 0.02 * tokens)

    points = {
        (WHOLE, "node"): [(n, whole_fit.price_us(n)) for n in lengths],
        (config, "node"): [(n, split_us(n)) for n in lengths[1:3]],
    }
    fit = fit_all(points)[config, "node"]
    for tokens in (512, 2048, 16384):
        assert fit.price_us(tokens) == pytest.approx(split_us(tokens), rel=0.02)
    (_, cheap) = points[config, "node"][0]
    points[config, "node"] = [(1024, cheap // 2)]  # cheaper than its computation: that is scaled
    assert fit_all(points)[config, "node"].price_us(1024) == pytest.approx(cheap // 2, rel=0.01)


def test_any_aspect_ratio_has_a_price() -> None:
    odd = Bucket("adhoc-3x7x11", (3, 7, 11))
    price = PRICES.price_us(odd, WHOLE, "node")
    assert price is not None and price >= 1
    assert not PRICES.is_measured(odd, WHOLE, "node")
