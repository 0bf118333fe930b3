"""What every policy must keep, and what each rival's own rule says."""

from __future__ import annotations

import random

import pytest

from tests.planner import toys
from zellige_lightning.errors import ConfigError, PlanningError, ZelligeError
from zellige_lightning.placement import ParallelConfig, Plan, build_schedule
from zellige_lightning.placement.sequence import GlobalBatch
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.planner import BatchPlanner, PlannerConfig, make_planner
from zellige_lightning.planner.policies import POLICIES
from zellige_lightning.planner.policies.adaptive_load import batch_sizes, fit_exponent
from zellige_lightning.planner.policies.hotspa import length_groups
from zellige_lightning.planner.policies.megatron import sub_steps
from zellige_lightning.planner.policies.menu import policy_problem

FIG2 = {"v720": 3, "i720": 228}


def policy(name: str, world: int, cap_mib: int = 60_000, **settings: object) -> BatchPlanner:
    config = PlannerConfig.of({"name": name, "family": "contiguous", "deterministic_limit": 2.0} | settings)
    topology = Topology.uniform(world)
    return make_planner(config, toys.table(world), toys.MEMORY, topology, toys.HEADS, cap_mib)


def check_plan(plan: Plan, planner: BatchPlanner, batch: GlobalBatch) -> None:
    """Every sequence once on a legal, priced option; loads and memory as Eq. (6) says; under the cap;
    every token held exactly once."""
    table, topology, memory = planner.menu.table, planner.menu.topology, planner.menu.memory
    loads, mib = [0] * plan.world_size, [0] * plan.world_size
    for sequence, option in zip(batch.sequences, plan.options, strict=True):
        price = table.price_us(sequence.bucket, option.config, topology.class_of(option.ranks))
        assert price is not None
        for rank in option.ranks:
            loads[rank] += price
            mib[rank] += memory.memory_mib(sequence.num_tokens, option.config)
    assert tuple(loads) == plan.loads_us
    assert tuple(mib) == plan.memory_mib
    assert max(mib, default=0) <= planner.menu.cap_mib
    assert plan.makespan_us >= plan.lower_bound_us
    lengths = [s.num_tokens for s in batch.sequences]
    held = sum(
        build_schedule(plan.options, lengths, rank, plan.world_size).num_tokens
        for rank in range(plan.world_size)
    )
    assert held == batch.num_tokens


@pytest.mark.parametrize("name", POLICIES)
def test_plans_keep_what_every_plan_must(name: str) -> None:
    """Random mixes, worlds and caps: a valid plan or a typed error, the same one again."""
    rng, planned = random.Random(name), 0
    for _ in range(12):
        world = rng.choice([1, 2, 3, 4, 6, 8])
        planner = policy(name, world, rng.choice([20_000, 60_000]))
        counts = {bucket: rng.choice([0, 0, 1, 2, 7, 30]) for bucket in toys.BUCKETS}
        batch = toys.batch(counts if any(counts.values()) else {"i720": 3})
        try:
            plan = planner.plan(batch)
        except PlanningError:
            continue
        check_plan(plan, planner, batch)
        assert policy(name, world, planner.menu.cap_mib).plan(batch).digest == plan.digest
        planned += 1
    assert planned >= 3


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("counts", [{"i256": 9}, {"v480": 4}, {"i720": 1}, FIG2])
def test_degenerate_batches(name: str, counts: dict[str, int]) -> None:
    """Only images, only videos, one sequence, the paper's Fig. 2."""
    planner = policy(name, 4)
    batch = toys.batch(counts)
    check_plan(planner.plan(batch), planner, batch)


@pytest.mark.parametrize("name", POLICIES)
def test_ten_ranks(name: str) -> None:
    """Where Megatron's own scheduler fails with an IndexError: two sequences, a world that is no power of
    two."""
    planner = policy(name, 10)
    batch = toys.batch({"i720": 2})
    check_plan(planner.plan(batch), planner, batch)


@pytest.mark.parametrize("name", POLICIES)
def test_members_of_a_bucket_are_interchangeable(name: str) -> None:
    """Shuffling the batch leaves loads alone."""
    planner, counts = policy(name, 4), {"v480": 3, "i720": 9, "i256": 20}
    batch = toys.batch(counts)
    samples = [(s.key, s.bucket) for s in batch.sequences]
    random.Random(0).shuffle(samples)
    assert planner.plan(GlobalBatch.of(0, 0, samples)).loads_us == planner.plan(batch).loads_us


def test_exact_is_never_worse() -> None:
    """All rivals' placements are in the joint action space where they use its rank sets."""
    for counts in ({"v720": 2, "i720": 40}, {"v480": 5, "i256": 100}, {"v720": 1, "v480": 2, "i720": 60}):
        batch = toys.batch(counts)
        best = policy("exact", 4).plan(batch).makespan_us
        for name in POLICIES:
            assert policy(name, 4).plan(batch).makespan_us >= best * (1 - 1e-3), name


def test_disjoint_is_at_least_as_good_as_every_disjoint_rival() -> None:
    for counts in ({"v720": 2, "i720": 40}, {"v480": 5, "i256": 100}):
        batch = toys.batch(counts)
        best = policy("disjoint", 8, deterministic_limit=20.0).plan(batch)
        assert best.statuses == ("OPTIMAL",)
        for name in ("naive", "adaptive_load", "usp", "knapformer", "flexsp"):
            assert policy(name, 8).plan(batch).makespan_us >= best.makespan_us, name


# ---- each rival's own rule ----


def test_figure_2_naive_and_adaptive_load() -> None:
    """Naive: one video on each of three ranks and only images on the fourth, equal tokens. AdaptiveLoad:
    more images on the fourth, fewer beside the videos."""
    batch = toys.batch(FIG2)
    tokens, images = {}, {}
    for name in ("naive", "adaptive_load"):
        plan = policy(name, 4, cap_mib=100_000).plan(batch)
        assert sorted(o.ranks for o in plan.options[:3]) == [(0,), (1,), (2,)]
        held = [0] * 4
        for sequence, option in zip(batch.sequences, plan.options, strict=True):
            held[option.ranks[0]] += sequence.num_tokens
        tokens[name] = held
        images[name] = sum(o.ranks == (3,) for o in plan.options)
    assert max(tokens["naive"]) - min(tokens["naive"]) <= 3600
    assert images["adaptive_load"] > images["naive"] >= 87


def test_figure_2_usp() -> None:
    plan = policy("usp", 4).plan(toys.batch(FIG2))
    assert {o.ranks for o in plan.options} == {(0, 1, 2, 3)}
    assert len({o.config for o in plan.options}) == 1


def test_adaptive_load_keeps_memory() -> None:
    """The last images go where memory is left, not where time is."""
    batch = toys.batch({"v720": 1, "i720": 60})
    free = policy("adaptive_load", 2, cap_mib=60_000).plan(batch)
    tight = policy("adaptive_load", 2, cap_mib=max(free.memory_mib) - 1).plan(batch)
    assert max(tight.memory_mib) < max(free.memory_mib)


def test_adaptive_load_sampler_form() -> None:
    assert fit_exponent([100, 200, 400], [10, 40, 160]) == pytest.approx(2.0)
    # The memory bound 10, then the compute bounds 4 and 1; longer than the memory is still one.
    assert batch_sizes([100, 200, 400], 2.0, memory_tokens=1000) == [10, 4, 1]
    assert batch_sizes([100, 200, 400], 2.0, memory_tokens=150) == [1, 1, 1]
    with pytest.raises(ConfigError, match="two buckets"):
        fit_exponent([100], [10])


@pytest.mark.parametrize("name", ["naive", "adaptive_load"])
def test_whole_policies_name_the_sequence_that_does_not_fit(name: str) -> None:
    with pytest.raises(PlanningError, match="v720.*out of memory"):
        policy(name, 4, cap_mib=12_000).plan(toys.batch({"v720": 1, "i256": 3}))


@pytest.mark.parametrize(
    ("layout", "config"), [("u4r2", (1, 4, 2)), ("u2r4", (1, 2, 4)), ("u1r8", (1, 1, 8)), ("u2r2", (1, 2, 2))]
)
def test_usp_by_name(layout: str, config: tuple[int, int, int]) -> None:
    plan = policy("usp", 8, layout=layout).plan(toys.batch({"v480": 2, "i256": 4}))
    assert {o.config for o in plan.options} == {ParallelConfig(*config)}
    assert len({o.ranks for o in plan.options}) == 8 // (config[0] * config[1] * config[2])


@pytest.mark.parametrize(
    ("layout", "says"), [("u8r1", "does not divide 12 heads"), ("u3r2", "do not divide 8"), ("8", "no USP")]
)
def test_usp_refuses(layout: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        policy("usp", 8, layout=layout)


def test_flexsp_takes_power_of_two_ulysses_groups_that_cover_all_ranks() -> None:
    plan = policy("flexsp", 8).plan(toys.batch({"v720": 1, "v480": 2, "i720": 30}))
    groups = {o.ranks for o in plan.options}
    assert sorted(r for ranks in groups for r in ranks) == list(range(8))
    assert {o.config for o in plan.options} <= {ParallelConfig(1, 2, 1), ParallelConfig(1, 4, 1)}


def test_bytescale_splits_only_what_does_not_fit() -> None:
    plan = policy("bytescale", 8, cap_mib=12_000).plan(toys.batch({"v720": 1, "v480": 1, "i720": 9}))
    assert plan.options[0].config == ParallelConfig(1, 1, 2)
    assert all(o.config.is_whole for o in plan.options[1:])


def test_skrull_is_whole_or_over_all_ranks() -> None:
    plan = policy("skrull", 4).plan(toys.batch({"v720": 2, "v480": 3, "i720": 30}))
    assert {len(o.ranks) for o in plan.options} == {1, 4}


def test_megatron_degrees_are_powers_of_two_and_sub_steps_fill_the_world() -> None:
    problem = policy_problem(
        policy("megatron", 8).menu.problem(toys.batch({"v720": 2, "v480": 3, "i720": 30}))
    )
    steps = sub_steps(problem, limit=-(-147_600 // 4))
    assert steps[0][0].degree == 4  # ceil(147,600 / 36,900)
    assert all(sum(team.degree for team in step) <= 8 for step in steps)
    assert all(team.degree & (team.degree - 1) == 0 for step in steps for team in step)
    assert sum(len(team.members) for step in steps for team in step) == 35
    assert sum(team.degree for team in steps[-1]) > 4  # doubled until the smallest no longer fits


def test_hotspa_gives_one_configuration_to_a_length_group() -> None:
    planner = policy("hotspa", 8)
    batch = toys.batch({"v720": 2, "v480": 3, "i720": 30, "i256": 9})
    problem = policy_problem(planner.menu.problem(batch))
    assert [[problem.groups[g].bucket for g in row] for row in length_groups(problem)] == [
        ["v720", "v480"],
        ["i720", "i256"],
    ]
    plan = planner.plan(batch)
    assert len({o.config for o in plan.options[:5]}) == 1
    assert len({o.config for o in plan.options[5:]}) == 1


def test_layout_must_be_text() -> None:
    with pytest.raises(ZelligeError, match="planner.layout"):
        PlannerConfig.of({"layout": 3})
