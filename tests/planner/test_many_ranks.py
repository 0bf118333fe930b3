"""Worlds of several nodes: prices by topology class, pods, and placements that the checker confirms."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tests.planner.toys import BUCKETS, HEADS, MEMORY, batch, choice, problem, table
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.checker import check
from zellige_lightning.planner.cost import ProfileTable
from zellige_lightning.planner.exact import solve_exact
from zellige_lightning.planner.instances import placements, plain
from zellige_lightning.planner.planner import BatchPlanner, PlannerConfig, make_planner
from zellige_lightning.planner.pods import cut_world, pod_sizes, search_pods
from zellige_lightning.planner.problem import Cell
from zellige_lightning.planner.sand import relieve_ranks
from zellige_lightning.planner.solution import num_splits, sums
from zellige_lightning.planner.symmetry import block_swaps, twin_classes
from zellige_lightning.simulator.cluster import load_cluster
from zellige_lightning.simulator.constants import SUITES
from zellige_lightning.simulator.suites import make_stage
from zellige_lightning.simulator.workloads import suite_batch


def node_planner(world: int, per_node: int, cross: float = 1.3, max_degree: int = 8) -> BatchPlanner:
    """Aligned rank sets that cross nodes cost `cross` times those inside one."""
    topology = Topology.uniform(world, per_node)
    flat = table(min(world, max_degree))
    prices = dict(flat.prices_us)
    for (name, config, _), price in flat.prices_us.items():
        starts = range(0, world - config.degree + 1, config.degree)
        for where in {topology.class_of(tuple(range(s, s + config.degree))) for s in starts} - {"node"}:
            prices[name, config, where] = int(price * cross)
    known = ProfileTable(flat.buckets, prices, {}, 0, {})
    config = PlannerConfig("exact", max_degree=max_degree)
    return make_planner(config, known, MEMORY, topology, HEADS, 60_000)


def confirmed(made: BatchPlanner, counts: dict[str, int]) -> tuple[int, int]:
    """(makespan, bound) of the plan, after the checker agreed."""
    problem, brief = made.problem(batch(counts))
    solution = solve_exact(problem, brief)
    makespan = max(sums(problem, solution.cells)[0])
    claims = {"makespan": makespan, "bound": solution.bound_us, "splits": num_splits(solution.cells)}
    assert check(plain(problem), placements(problem, solution.cells), claims).faults == ()
    return makespan, solution.bound_us


@pytest.mark.parametrize("world", [65, 96, 100, 128, 192])
def test_worlds_beyond_one_search_are_placed_in_pods(world: int) -> None:
    made = node_planner(world, 8)
    makespan, bound = confirmed(
        made, {"v720": world // 3, "v480": world, "i720": 9 * world, "i256": 40 * world}
    )
    assert makespan <= 1.02 * bound
    plan = made.plan(batch({"v720": world // 3, "i256": world}))
    assert plan.bound_source == "area at T"
    assert plan.statuses[1] == "OPEN"  # nothing is claimed about the number of splits


def test_pods_cover_the_world_once() -> None:
    for world, size in product((65, 72, 96, 119, 120, 1024), (32, 48)):
        pods = cut_world(world, size)
        assert [r for pod in pods for r in pod] == list(range(world))
        assert all(size / 2 <= len(pod) < 2 * size for pod in pods)


def test_pods_suit_the_degree_of_what_weighs_most() -> None:
    by_degree = {1: 32, 2: 32, 3: 48, 4: 32, 5: 32, 6: 48, 8: 32, 12: 48, 16: 32}
    for degree, ranks in by_degree.items():
        heavy = [choice(d, 120 // d, 1, 96) for d in (1, 2, 3, 4, 5, 6, 8, 12, 16)]
        assert pod_sizes(problem(96, 9, (2, heavy), (9, [choice(1, 1, 1, 96)])), 120 // degree)[0] == ranks


def test_light_sequences_leave_pods_that_have_too_many() -> None:
    """31 pairs are full with a heavy sequence each, 34 ranks take 100 light ones each."""
    light, heavy = choice(1, 1, 1, 96), choice(2, 100, 1, 96)
    toy = problem(96, 10_000, (31, [heavy]), (3_400, [light]))
    found = search_pods(toy, 1e-3, 1_000)
    assert found is not None
    makespan, cells, bound = found
    assert (makespan, max(sums(toy, cells)[0])) == (bound, bound)
    crowded = [c for c in cells if c.group == 0] + [Cell(1, 0, (rank,), 1_700) for rank in (94, 95)]
    relieved = relieve_ranks(toy, crowded, (1,), 102)
    assert sum(c.count for c in relieved) == 31 + 3_400
    assert max(sums(toy, relieved)[0]) == 102


def test_a_batch_that_no_pod_can_hold_falls_back_to_one_search() -> None:
    """One sequence that needs half the world: no pod has a rank set for it."""
    made = node_planner(96, 8, max_degree=96)
    problem, brief = made.problem(batch({"v720": 1}))
    wide = [c for c in problem.groups[0].choices if c.config.degree == 96]
    only = problem.groups[0].__class__("v720", (0,), tuple(wide))
    problem = problem.__class__(96, 60_000, (only,))
    assert search_pods(problem, 1e-3, 100) is None
    assert solve_exact(problem, brief).cells[0].ranks == tuple(range(96))


def test_sets_across_nodes_are_used_only_where_they_pay() -> None:
    rng = random.Random(3)
    for _ in range(5):
        counts = {name: rng.randint(1, 3) for name in BUCKETS} | {"i256": 60}
        makespans = [confirmed(node_planner(12, 6, cross), counts)[0] for cross in (1.0, 3.0)]
        assert makespans[0] <= makespans[1] * 1.001
    dear = node_planner(12, 6, cross=50.0).plan(batch({"v720": 3, "v480": 3, "i256": 60}))
    topology = Topology.uniform(12, 6)
    assert {topology.class_of(o.ranks) for o in dear.options} == {"node"}


def test_exchangeable_ranks_and_blocks() -> None:
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
    fours = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert twin_classes(8, {pairs, fours}) == (0, 0, 2, 2, 4, 4, 6, 6)
    assert set(block_swaps(8, {pairs, fours})) == {(0, 2, 2), (4, 6, 2), (0, 4, 4)}
    assert twin_classes(4, {tuple((r,) for r in range(4))}) == (0, 0, 0, 0)
    assert block_swaps(4, {tuple((r,) for r in range(4))}) == ()
    threes = ((0, 1, 2), (3, 4, 5))  # 2 and 3 are partners in a pair but sit in different triples
    assert twin_classes(6, {pairs[:3], threes}) == (0, 0, 2, 3, 4, 4)


def test_configurations_that_a_class_has_no_price_for_are_no_options() -> None:
    flat = table(8)
    prices = {k: v for k, v in flat.prices_us.items() if k[1].degree < 8}
    topology = Topology.uniform(8, 4)
    made = make_planner(
        PlannerConfig("exact"), ProfileTable(flat.buckets, prices, {}, 0, {}), MEMORY, topology, HEADS, 60_000
    )
    plan = made.plan(batch({"v720": 1}))
    assert plan.options[0].config.degree == 4  # degree 5 to 7 would cross nodes, where nothing was measured
    assert plan.options[0].config != ParallelConfig()


def test_small_devices_in_pairs_are_certified() -> None:
    """32 modeled A6000: long videos fit on many ranks only, where a short search leaves over 1 %."""
    suite = SUITES["n32"]
    stage = make_stage(load_cluster(suite.cluster), suite.ranks, suite.seconds)
    made = stage.planner(stage.config("exact"))
    problem, brief = made.problem(suite_batch(suite, 60))
    solution = solve_exact(problem, brief)
    makespan = max(sums(problem, solution.cells)[0])
    claims = {"makespan": makespan, "bound": solution.bound_us, "splits": num_splits(solution.cells)}
    assert check(plain(problem), placements(problem, solution.cells), claims).faults == ()
    assert makespan <= 1.003 * solution.bound_us
