"""Which steps are timed, within which budget, and what becomes of noise, gaps and ranks out of memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement import Bucket, ParallelConfig, Topology
from zellige_lightning.placement.plan import WHOLE
from zellige_lightning.planner import MemoryModel, ModelGeometry, ProfileTable, legal_configs
from zellige_lightning.planner.filling import filling_of
from zellige_lightning.profile_mixes import MixMaker, observed
from zellige_lightning.profile_rounds import Probe, Rounds, base, copies_of, informative_first, probes_of
from zellige_lightning.profile_runs import Timing
from zellige_lightning.profile_table import doubtful_prices, table_of
from zellige_lightning.profiler import ProfilerConfig

WORLD = 4
BUCKETS = tuple(Bucket(f"b{n}", (n, 8, 8)) for n in (1, 4, 8, 16, 32, 64))
CONFIGS = tuple(c for c in legal_configs(4, WORLD) if c.degree in (1, 2, 4))
FIXED_US, START_US = 2000.0, 500.0


def true_price_us(bucket: Bucket, config: ParallelConfig) -> float:
    tokens = bucket.num_tokens
    exchange = 0.0 if config.is_whole else 60.0 + 0.05 * tokens
    return (tokens + tokens**2 / 2000) / config.degree + exchange


@dataclass
class Machine:
    """Stands in for `Measurement`: a clock that steps move on, and noise that is drawn for each."""

    noise: tuple[float, ...] = (1.0,)
    too_large: frozenset[tuple[str, ParallelConfig]] = frozenset()
    world_size: int = WORLD
    elapsed_s: float = 0.0
    steps: list[Any] = field(default_factory=list)
    fills: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._generator = Random(0)

    def plan(self, options: Any, buckets: Any, fill: Any = None) -> Any:
        self.fills.append(fill)
        return tuple(options), tuple(buckets)

    def fits(self, batch: Any) -> bool:
        options, buckets = batch
        self.elapsed_s += self._us(batch) / 1e6
        return (buckets[0].name, options[0].config) not in self.too_large

    def _us(self, batch: Any) -> float:
        options, buckets = batch
        first = [(o, b) for o, b in zip(options, buckets, strict=True) if options[0].ranks[0] in o.ranks]
        shared = [o for o, _ in first if o.config.is_packed and not o.config.is_whole]
        prices = (true_price_us(b, o.config) for o, b in first if b.name != "tiny")
        return FIXED_US + START_US * bool(shared) + sum(prices)

    def step(self, batch: Any) -> Timing:
        us = self._us(batch) * self._generator.choice(self.noise)
        self.elapsed_s += us / 1e6
        self.steps.append(batch)
        return Timing((us,) * WORLD, (us,) * WORLD)


def probes(fits: Any = lambda bucket, config: True) -> list[Probe]:
    found = probes_of(BUCKETS, CONFIGS, Topology.uniform(WORLD), "aligned", fits)
    return [base(), *informative_first(found)]


def profiled(machine: Machine, budget_s: float = 1e9, repeats: int = 5) -> tuple[ProfileTable, Rounds]:
    wanted = probes()
    rounds = Rounds(machine, budget_s, repeats)  # type: ignore[arg-type]
    rounds.run(wanted)
    return table_of(rounds, wanted[1:], BUCKETS, 0.0, {}), rounds


def worst_error(table: ProfileTable) -> float:
    return max(
        abs(us / true_price_us(next(b for b in BUCKETS if b.name == key[0]), key[1]) - 1.0)
        for key, us in table.prices_us.items()
    )


def test_prices_are_the_marginal_cost_of_one_more_sequence() -> None:
    table, _ = profiled(Machine())
    assert len(table.prices_us) == len(BUCKETS) * len(CONFIGS) and not table.interpolated
    assert table.fixed_us == FIXED_US
    assert worst_error(table) < 0.01
    assert set(table.spread_us.values()) == {0}


def test_the_start_of_a_call_is_in_no_price() -> None:
    """Neither in those of short sequences, timed in two numbers, nor in those of long ones, timed alone."""
    table, rounds = profiled(Machine())
    packed = {key[1:] for key in table.prices_us if key[1].is_packed and not key[1].is_whole}
    assert set(table.start_us) == packed == {(ParallelConfig(1, h, 1), "node") for h in (2, 4)}
    assert set(table.start_us.values()) == {START_US}
    alone = ("b64", ParallelConfig(1, 2, 1), "node")
    assert len(rounds.copies(alone)) == 1 and len(rounds.copies(("b1", *alone[1:]))) == 2
    assert table.prices_us[alone] == pytest.approx(true_price_us(BUCKETS[-1], alone[1]), abs=1)


def test_noise_makes_no_start_of_its_own() -> None:
    table, _ = profiled(Machine(noise=(1.0, 1.01, 0.99, 1.0, 1.5)))
    assert all(us == pytest.approx(START_US, rel=0.5) for us in table.start_us.values())


def test_packed_sequences_are_timed_in_two_numbers_and_others_alone() -> None:
    short, long = BUCKETS[0], BUCKETS[-1]
    few, many = copies_of(short, WHOLE)
    assert many == 2 * few > 2
    assert copies_of(short, ParallelConfig(1, 2, 1)) == (1, many), "the start is in the first alone"
    assert copies_of(long, WHOLE) == (1,)
    assert copies_of(short, ParallelConfig(2, 1, 1)) == copies_of(short, ParallelConfig(1, 2, 2)) == (1,)


def test_noise_is_met_with_medians_and_more_repeats() -> None:
    quiet, noisy = Machine(), Machine(noise=(1.0, 1.03, 0.98, 1.0, 1.9, 1.01, 0.99))
    profiled(quiet)
    table, _ = profiled(noisy)
    assert len(noisy.steps) > len(quiet.steps)
    assert worst_error(table) < 0.35
    assert max(table.spread_us.values()) > 0


def test_a_small_price_gets_more_repeats_than_its_steps_would_need() -> None:
    """Steps that differ by 1 % leave no doubt about a long sequence, but about one of many short ones."""
    _, rounds = profiled(Machine(noise=(0.99, 1.0, 1.01)))
    repeats = {
        bucket.name: len(rounds.samples[p])
        for bucket in BUCKETS
        for p in rounds.samples
        if p.bucket == bucket and p.config == WHOLE
    }
    assert repeats["b64"] == 5 < repeats["b1"]


def test_only_a_price_that_its_neighbours_rule_out_is_replaced() -> None:
    """A short sequence far below a straight line through longer ones is right: they leave its price open."""
    a, b, c = BUCKETS[0], BUCKETS[1], BUCKETS[2]
    key = lambda bucket: (bucket.name, WHOLE, "node")  # noqa: E731
    assert doubtful_prices(BUCKETS, {key(a): 70.0, key(b): 348.0, key(c): 670.0}) == set()
    assert doubtful_prices(BUCKETS, {key(a): 10.0, key(b): 348.0, key(c): 670.0}) == {key(a)}
    assert doubtful_prices(BUCKETS, {key(a): 70.0, key(b): 30.0, key(c): 670.0}) == {key(b)}
    assert doubtful_prices(BUCKETS, {key(a): -1.0, key(b): 348.0}) == {key(a)}
    assert doubtful_prices(BUCKETS, {key(a): -1.0}) == set(), "nothing to replace it by"


def test_a_fixed_cost_that_was_measured_too_high_makes_no_work_free() -> None:
    machine = Machine()
    wanted = probes()
    rounds = Rounds(machine, 1e9, 3)  # type: ignore[arg-type]
    rounds.run(wanted)
    rounds.samples[base()] = [Timing((1e7,) * WORLD, (1e7,) * WORLD)] * 3
    table = table_of(rounds, wanted[1:], BUCKETS, 0.0, {})
    assert min(table.prices_us.values()) > 0.3 * min(true_price_us(b, c) for b in BUCKETS for c in CONFIGS)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
def test_the_budget_is_kept_and_what_it_did_not_reach_is_interpolated(share: float) -> None:
    _, complete = profiled(Machine(), repeats=3)
    budget_s = share * complete.measurement.elapsed_s
    machine = Machine()
    table, rounds = profiled(machine, budget_s, repeats=3)
    assert machine.elapsed_s <= budget_s
    assert {key for key in table.prices_us if key[1] == WHOLE} == {(b.name, WHOLE, "node") for b in BUCKETS}
    skipped = {(p.bucket.name, p.config, p.topology_class) for p in rounds.skipped}
    assert table.interpolated <= skipped
    assert all(table.is_measured(*_of(key)) == (key not in table.interpolated) for key in table.prices_us)
    assert worst_error(table) < 0.35


def _of(key: Any) -> Any:
    return next(b for b in BUCKETS if b.name == key[0]), key[1], key[2]


def test_mixed_plans_run_with_their_pauses_filled() -> None:
    """As in training; a single sequence has nothing to fill a pause with."""
    machine = Machine()
    table, _ = profiled(machine, repeats=1)
    assert set(machine.fills) == {None}
    shape = ModelGeometry(2, 4, 8, 4, 100, 100, 0)
    mixes = MixMaker(table, Topology.uniform(WORLD), "aligned", MemoryModel(shape), 1 << 20).mixes(4)
    fill = partial(filling_of, table=table, topology=Topology.uniform(WORLD))
    machine.fills.clear()
    steps = observed(machine, mixes, 2, 1e9, "wall", fill)  # type: ignore[arg-type]
    assert len(steps) == len(mixes) == len(machine.fills) == 4 and set(machine.fills) == {fill}


def test_without_a_budget_only_the_shortest_is_timed() -> None:
    machine = Machine()
    table, rounds = profiled(machine, 0.0)
    assert {probe.bucket.name for probe in rounds.samples} == {"tiny", "b1"}
    assert all(len(timings) == 1 for timings in rounds.samples.values())
    assert set(table.prices_us) - table.interpolated == {("b1", WHOLE, "node")}
    assert {key[1] for key in table.prices_us} == {WHOLE}


def test_a_pair_that_runs_out_of_memory_is_no_option_and_others_stay() -> None:
    large = ("b64", ParallelConfig(2, 1, 1))
    table, rounds = profiled(Machine(too_large=frozenset({large})))
    assert (*large, "node") not in table.prices_us
    assert {(p.bucket.name, p.config) for p in rounds.infeasible} == {large}
    assert len(table.prices_us) == len(BUCKETS) * len(CONFIGS) - 1


def test_only_pairs_under_the_cap_that_the_family_can_place_are_timed() -> None:
    found = probes(lambda bucket, config: bucket.num_tokens / config.degree <= 1024)
    assert all(p.bucket.num_tokens <= 1024 * p.config.degree for p in found)
    nodes = Topology.uniform(WORLD, 2)
    across = probes_of(BUCKETS, CONFIGS, nodes, "node", lambda bucket, config: True)
    assert {p.config.degree for p in across} == {1, 2}, "no set of 4 lies inside a node of 2"
    both = probes_of(BUCKETS, CONFIGS, nodes, "contiguous", lambda bucket, config: True)
    assert {(p.config.degree, p.topology_class) for p in both} == {
        (1, "node"),
        (2, "node"),
        (2, "1+1"),
        (4, "2+2"),
    }


def test_the_ends_of_the_catalog_come_first() -> None:
    order = [p.bucket.name for p in probes()[1:] if p.config == ParallelConfig(4, 1, 1)]
    assert order[:3] == ["b1", "b64", "b8"]


@pytest.mark.parametrize(
    "wrong", [{"time_budget_s": -1}, {"time_budget_s": float("nan")}, {"repeats": 0}, {"clock": "sun"}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"profiler.{next(iter(wrong))}"):
        ProfilerConfig(**wrong)
