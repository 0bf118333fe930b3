"""KnapFormer's assignment, on batches where its own balancer crashed or surprised."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.planner import toys
from zellige_lightning.errors import ConfigError, PlanningError
from zellige_lightning.placement import ParallelConfig, Plan
from zellige_lightning.placement.sequence import Bucket, GlobalBatch
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.planner import BatchPlanner, PlannerConfig, make_planner
from zellige_lightning.planner.policies.knapformer import layout_name, parse_layout, partitions
from zellige_lightning.planner.policies.workload import Workload


def knapformer(
    world: int, layout: str = "auto", buckets: dict[str, Bucket] = toys.BUCKETS, cap_mib: int = 60_000
) -> BatchPlanner:
    config = PlannerConfig(name="knapformer", layout=layout, family="contiguous")
    topology = Topology.uniform(world)
    return make_planner(config, toys.table(world, buckets), toys.MEMORY, topology, toys.HEADS, cap_mib)


def routed(plan: Plan, batch: GlobalBatch) -> Counter[tuple[str, tuple[int, ...]]]:
    return Counter((s.bucket.name, o.ranks) for s, o in zip(batch.sequences, plan.options, strict=True))


def test_one_sequence_leaves_a_bag_idle() -> None:
    plan = knapformer(8, "g4n2").plan(toys.batch({"v480": 1}))
    assert [o.ranks for o in plan.options] == [(0, 1, 2, 3)]
    assert plan.loads_us[4:] == (0, 0, 0, 0)


def test_seven_sequences_in_eight_single_bags() -> None:
    plan = knapformer(8, "g1n8").plan(toys.batch({"i720": 7}))
    assert sorted(o.ranks for o in plan.options) == [(r,) for r in range(7)]


@pytest.mark.parametrize("count", [4, 5])
def test_equal_videos_all_go_to_the_large_bag(count: int) -> None:
    """Each is more than a fair share of one rank, so that only the bag of four has the capacity."""
    plan = knapformer(8, "g1n4+g4n1").plan(toys.batch({"v480": count}))
    assert {o.ranks for o in plan.options} == {(4, 5, 6, 7)}


def test_capacity_is_tested_as_if_the_bag_were_empty() -> None:
    """Two videos of w in g2n2 on 4 ranks: fair share w / 2 per rank, capacity w per bag, one video each."""
    plan = knapformer(4, "g2n2").plan(toys.batch({"v480": 2}))
    assert sorted(o.ranks for o in plan.options) == [(0, 1), (2, 3)]


def test_light_sequences_follow_relative_occupancy() -> None:
    """One video fills the bag of two more than the images can balance: they all go to the single bags."""
    batch = toys.batch({"v480": 1, "i256": 4})
    plan = knapformer(4, "g1n2+g2n1").plan(batch)
    assert routed(plan, batch) == {("v480", (2, 3)): 1, ("i256", (0,)): 2, ("i256", (1,)): 2}


def test_a_sequence_too_heavy_for_every_bag_goes_to_the_largest() -> None:
    batch = toys.batch({"v720": 1, "i256": 1})
    plan = knapformer(8, "g2n4").plan(batch)
    assert plan.options[0].ranks == (0, 1)


def test_tiny_sequences_avoid_bags_with_more_ranks_than_tokens() -> None:
    buckets = {"tiny": Bucket("tiny", (1, 1, 3)), "v480": toys.BUCKETS["v480"]}
    batch = GlobalBatch.of(0, 0, [("v", buckets["v480"]), *((f"t{i}", buckets["tiny"]) for i in range(9))])
    plan = knapformer(8, "g4n2", buckets).plan(batch)  # all bags are too large
    assert {len(o.ranks) for o in plan.options} == {4}
    mixed = knapformer(8, "g1n4+g4n1", buckets).plan(batch)
    assert {o.ranks for o in mixed.options[1:]} == {(0,), (1,), (2,), (3,)}


def test_replicas_do_not_share_work() -> None:
    """g2n1 on 4 ranks is two replicas, dealt in turn."""
    batch = toys.batch({"v480": 1, "i256": 3})
    plan = knapformer(4, "g2n1").plan(batch)
    assert routed(plan, batch) == {("v480", (0, 1)): 1, ("i256", (2, 3)): 2, ("i256", (0, 1)): 1}


def test_one_rank_has_one_layout() -> None:
    plan = knapformer(1).plan(toys.batch({"v480": 1, "i256": 3}))
    assert {o.ranks for o in plan.options} == {(0,)}


@pytest.mark.parametrize("counts", [{"v480": 3}, {"v480": 8}])
def test_a_catalog_of_one_bucket(counts: dict[str, int]) -> None:
    """The fitted work has one point; equal videos are dealt evenly."""
    plan = knapformer(4, buckets={"v480": toys.BUCKETS["v480"]}).plan(toys.batch(counts))
    assert plan.imbalance == pytest.approx(1.0)


def test_equal_sequences_take_equal_bags_in_rank_order() -> None:
    batch = toys.batch({"i720": 6})
    counts = routed(knapformer(4, "g1n4").plan(batch), batch)
    assert [counts["i720", (rank,)] for rank in range(4)] == [2, 2, 1, 1]


def test_a_video_that_fits_over_all_ranks_only() -> None:
    memory = [toys.MEMORY.memory_mib(147_600, ParallelConfig(1, g, 1)) for g in (3, 4)]
    cap = sum(memory) // 2
    plan = knapformer(4, cap_mib=cap).plan(toys.batch({"v720": 1, "i256": 3}))
    assert plan.options[0].ranks == (0, 1, 2, 3)
    with pytest.raises(PlanningError, match="g3n1"):
        knapformer(4, "g3n1+g1n1", cap_mib=cap).plan(toys.batch({"v720": 1, "i256": 3}))


def test_figure_2_in_the_layout_of_the_paper() -> None:
    """g3n1+g1n1: rank 0 is alone and ranks 1-3 share all three videos. The videos fill their bag beyond
    its fair share, so that every image goes to rank 0, which takes more memory than a card of 80 GB has."""
    batch = toys.batch({"v720": 3, "i720": 228})
    plan = knapformer(4, "g3n1+g1n1", cap_mib=100_000).plan(batch)
    assert routed(plan, batch) == {("v720", (1, 2, 3)): 3, ("i720", (0,)): 228}
    assert max(plan.memory_mib) == plan.memory_mib[0] > 76_000
    with pytest.raises(PlanningError, match="rank 0.*out of memory"):
        knapformer(4, "g3n1+g1n1", cap_mib=76_000).plan(batch)


def test_images_inherit_the_split_of_the_bag_that_they_are_routed_to() -> None:
    batch = toys.batch({"v480": 1, "i720": 300})
    routes = routed(knapformer(4, "g3n1+g1n1").plan(batch), batch)
    assert routes["i720", (0,)] > 0 and routes["i720", (1, 2, 3)] > 0


def test_auto_is_the_best_of_all_layouts() -> None:
    batch = toys.batch({"v720": 2, "v480": 3, "i720": 20})
    best = knapformer(8).plan(batch).makespan_us
    everyone = []
    for sizes in partitions(8, [1, 2, 3, 4, 6]):
        everyone.append(knapformer(8, layout_name(sizes)).plan(batch).makespan_us)
    assert best == min(everyone)


@pytest.mark.parametrize(
    ("world", "degrees", "count"), [(8, 5, 17), (16, 5, 92), (32, 5, 729), (16, 6, 97), (32, 6, 918)]
)
def test_number_of_layouts(world: int, degrees: int, count: int) -> None:
    assert len(list(partitions(world, [1, 2, 3, 4, 6, 12][:degrees]))) == count


def test_layouts_are_read_and_written() -> None:
    assert parse_layout("g4n1+g1n2+g2n1", 8, 12) == (1, 1, 2, 4)
    assert layout_name((1, 1, 2, 4)) == "g1n2+g2n1+g4n1"


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        ("g8n1", "do not divide 12 heads"),
        ("g3n1", "do not divide the world of 8"),
        ("g1n1+g1n7", "twice"),
        ("4x2", "is no layout"),
        ("g0n1", "is no layout"),
        ("", "planner.layout"),
    ],
)
def test_impossible_layouts_are_typed_errors(layout: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        knapformer(8, layout)


def test_a_layout_that_would_run_out_of_memory_is_refused() -> None:
    with pytest.raises(PlanningError, match="out of memory"):
        knapformer(2, "g1n2", cap_mib=15_000).plan(toys.batch({"v720": 3, "i720": 1}))


def test_gamma_is_the_ratio_of_the_fitted_terms() -> None:
    width, gamma = 1536, 0.4
    points = [
        (n, round(1e3 * (24 * n * width**2 + gamma * 4 * n * n * width) / 1e12))
        for n in range(4096, 65537, 4096)
    ]
    assert Workload.fit(points).gamma(width) == pytest.approx(gamma, rel=2e-2)
