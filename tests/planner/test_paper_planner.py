"""Algorithm 1 end to end: golden plan, degenerate batches, failures that name what failed."""

from __future__ import annotations

import pytest

from tests.planner.toys import BUCKETS, HEADS, MEMORY, batch, planner, table
from zellige_lightning.errors import ConfigError, PlanningError
from zellige_lightning.placement.plan import WHOLE, ParallelConfig, Plan, rank_sums
from zellige_lightning.placement.sequence import Bucket, GlobalBatch, Sequence
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.cost import ProfileTable
from zellige_lightning.planner.planner import PlannerConfig, make_planner

MIXED = {"v720": 2, "v480": 3, "i720": 9, "i256": 40}


def check(plan: Plan, what: GlobalBatch, world: int, cap_mib: int = 60_000) -> None:
    """Sums and bound recomputed from the placement alone."""
    prices, wants = table(world), [s.bucket for s in what.sequences]
    costs = [prices.price_us(b, o.config, "node") for b, o in zip(wants, plan.options, strict=True)]
    mib = [MEMORY.memory_mib(b.num_tokens, o.config) for b, o in zip(wants, plan.options, strict=True)]
    assert plan.loads_us == rank_sums(plan.options, costs, world)
    assert plan.memory_mib == rank_sums(plan.options, mib, world)
    assert max(plan.memory_mib) <= cap_mib
    assert plan.lower_bound_us <= plan.makespan_us
    assert plan.world_size == world
    assert plan.step == what.step


@pytest.mark.parametrize("name", ["paper", "joint"])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_plans_are_complete_and_certified(name: str, world: int) -> None:
    what = batch({"v720": 1, "v480": 2, "i720": 5, "i256": 9})
    plan = planner(world, name=name).plan(what)
    check(plan, what, world)
    assert plan.statuses == ("OPTIMAL", "OPTIMAL")
    assert plan.planner == name
    assert plan.fixed_us == 500
    assert plan.anchors == (0, 1, 2)
    assert plan.bound_source == ("CP-SAT" if name == "joint" else plan.bound_source)
    assert Plan.from_json(plan.to_json()) == plan


def test_same_batch_same_plan() -> None:
    plans = {planner(4).plan(batch(MIXED)).digest for _ in range(3)}
    assert len(plans) == 1


def test_fillers_stay_whole_and_anchors_may_split() -> None:
    plan = planner(4).plan(batch(MIXED))
    split = {i for i, o in enumerate(plan.options) if not o.config.is_whole}
    assert split
    assert split <= set(plan.anchors)


def test_joint_is_never_worse_than_two_stages() -> None:
    what = batch(MIXED)
    paper, joint = planner(4).plan(what), planner(4, name="joint").plan(what)
    assert joint.lower_bound_us <= joint.makespan_us <= paper.makespan_us * 1.001


def test_direct_formulation_reaches_the_same_optimum() -> None:
    what = batch({"v720": 2, "v480": 2, "i720": 3})
    plans = [planner(4, ecf=ecf).plan(what) for ecf in (True, False)]
    assert plans[0].num_splits == plans[1].num_splits
    assert max(plans[0].loads_us) == pytest.approx(max(plans[1].loads_us), rel=2e-3)


@pytest.mark.parametrize(
    "counts",
    [
        {},  # an empty batch
        {"i256": 5},  # no anchors
        {"v720": 2},  # no fillers
        {"i256": 1},  # fewer sequences than ranks
        {"v480": 7},  # equal videos
        {"v720": 1, "i256": 1},
    ],
)
@pytest.mark.parametrize("world", [1, 3, 4])
def test_degenerate_batches(counts: dict[str, int], world: int) -> None:
    what = batch(counts)
    check(planner(world).plan(what), what, world)


def test_a_one_bucket_catalog_is_planned() -> None:
    prices = table(3, {"i720": BUCKETS["i720"]})
    made = make_planner(PlannerConfig("paper"), prices, MEMORY, Topology.uniform(3), HEADS, 10_000)
    what = batch({"i720": 4})
    plan = made.plan(what)
    assert plan.anchors == (0, 1, 2, 3)
    assert plan.makespan_us < 2 * prices.whole_us(BUCKETS["i720"])  # one of the four is split


def test_shapes_outside_the_catalog_are_planned() -> None:
    bucket = Bucket("adhoc-60x45x80", (60, 45, 80))
    what = GlobalBatch(0, 0, (Sequence(0, "a", bucket),), 1, bucket.num_tokens)
    plan = planner(2).plan(what)
    assert plan.anchors == (0,)
    assert plan.num_splits == 1


def test_a_sequence_that_fits_nowhere_is_named_with_its_needs() -> None:
    with pytest.raises(PlanningError) as caught:
        planner(2, cap_mib=3_000).plan(batch({"i256": 1, "v720": 1}, step=17))
    text = str(caught.value)
    assert "sequence 1 ('v720/1', bucket 'v720', 147600 tokens)" in text
    assert "3000 MiB" in text
    need = MEMORY.memory_mib(147_600, ParallelConfig(1, 2, 1))
    assert f"(1,2,1): {need} MiB" in text
    assert caught.value.step == 17


def test_anchors_that_do_not_fit_together_are_named() -> None:
    with pytest.raises(PlanningError, match="6 x v720"):
        planner(2, cap_mib=16_000).plan(batch({"v720": 6}))


def test_fillers_that_do_not_fit_are_named() -> None:
    need = MEMORY.memory_mib(3600, WHOLE)
    with pytest.raises(PlanningError, match=f"filler 4 .*needs {need} MiB"):
        planner(2, cap_mib=2 * need + 1).plan(batch({"i720": 5}))


def test_an_uncertified_round_fails_by_name() -> None:
    with pytest.raises(PlanningError, match="did not certify"):
        planner(8, deterministic_limit=1e-7).plan(batch(MIXED))


def test_a_split_that_is_cheaper_in_total_keeps_the_bound_valid() -> None:
    bucket = BUCKETS["v720"]
    prices = {(bucket.name, WHOLE, "node"): 1000, (bucket.name, ParallelConfig(1, 2, 1), "node"): 300}
    odd = ProfileTable((bucket,), prices, {}, 0, {})
    plan = make_planner(PlannerConfig("paper"), odd, MEMORY, Topology.uniform(2), HEADS, 60_000).plan(
        batch({"v720": 2})
    )
    assert plan.makespan_us == 600
    assert plan.lower_bound_us == 600


@pytest.mark.parametrize(
    "settings",
    [
        {"name": "clever"},
        {"family": "diagonal"},
        {"epsilon": -1},
        {"epsilon": float("nan")},
        {"memory_cap_gib": 0},
        {"max_degree": 0},
        {"num_workers": 1.5},
        {"deterministic_limit": 0},
        {"seed": -1},
        {"ecf": "yes"},
        {"max_waves": 0},
        {"defer": 1},
        {"ranks_per_node": 0},
        {"max_groups_per_rank": 0},
        {"epsilonn": 1e-3},
    ],
)
def test_bad_settings_name_the_key(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        PlannerConfig.of(settings)


def test_the_default_is_the_certified_planner() -> None:
    assert PlannerConfig() == PlannerConfig("exact") == PlannerConfig.of(None)
    assert PlannerConfig.of({"epsilon": 0.5}).name == "exact"


def test_a_cap_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="cap"):
        planner(2, cap_mib=0)


def test_a_family_above_the_bound_is_refused_when_the_planner_is_made() -> None:
    with pytest.raises(ConfigError, match="'all'"):
        planner(8, family="all", max_groups_per_rank=10)
