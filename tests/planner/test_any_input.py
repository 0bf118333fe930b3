"""Random worlds, catalogs, heads, caps, families and prices: a checked plan, or a proven error."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.planner.test_exact import INSTANCES, feasible, solved
from tests.planner.toys import GEOMETRY
from zellige_lightning.errors import ConfigError, PlanningError
from zellige_lightning.placement.sequence import Bucket, GlobalBatch
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.anchors import SolverLimits, place_anchors
from zellige_lightning.planner.assemble import assemble
from zellige_lightning.planner.checker import check
from zellige_lightning.planner.cost import MemoryModel, ProfileTable
from zellige_lightning.planner.fillers import FillerGroup, FillerOverflowError, pack_fillers
from zellige_lightning.planner.instances import make_brief, placements, plain, read_problem
from zellige_lightning.planner.options import legal_configs, legal_rank_sets
from zellige_lightning.planner.paper import solve_paper
from zellige_lightning.planner.planner import BatchPlanner, PlannerConfig, make_planner
from zellige_lightning.planner.problem import PlacementProblem
from zellige_lightning.planner.solution import num_splits, sums


def draw_table(rng: random.Random, topology: Topology, heads: int, family: str, most: int) -> ProfileTable:
    """Splits may cost less in total than the whole, or more time than it: profiles need not be monotone."""
    buckets = [
        Bucket(f"b{i}", (rng.randint(1, 9), rng.randint(1, 40), rng.randint(1, 40)))
        for i in range(rng.randint(1, 5))
    ]
    classes = {
        (config, topology.class_of(ranks))
        for config in legal_configs(heads, topology.world_size, most)
        for ranks in legal_rank_sets(topology, config.degree, family)
    }
    prices = {}
    for bucket in buckets:
        whole = bucket.num_tokens // 3 + bucket.num_tokens**2 // 4000 + 1
        for config, where in sorted(classes):
            if config.is_whole:
                prices[bucket.name, config, where] = whole
            elif rng.random() < 0.8:
                share = rng.uniform(0.95, 1.5) * (1 if where == "node" else rng.uniform(1, 4))
                prices[bucket.name, config, where] = max(
                    1, int(whole * share / config.degree) + rng.randint(0, 40)
                )
    return ProfileTable(tuple(buckets), prices, {}, 7, {})


def draw_planner(rng: random.Random, world: int) -> tuple[BatchPlanner, GlobalBatch]:
    topology = Topology.uniform(world, rng.choice([None, 2, 3, 4, 8]))
    family = rng.choice(["aligned", "contiguous", "node", *(["all"] if world <= 6 else [])])
    heads, most = rng.choice([1, 3, 8, 12, 16, 24, 40]), rng.choice([2, 3, 4, 8])
    table = draw_table(rng, topology, heads, family, most)
    samples = [
        (f"{i}", rng.choice(table.buckets)) for i in range(rng.choice([0, 1, 3, world, 4 * world, 300]))
    ]
    memory = MemoryModel(replace(GEOMETRY, num_heads=heads))
    needs = [memory.memory_mib(bucket.num_tokens, legal_configs(1, 1)[0]) for _, bucket in samples]
    cap = max(1, int(sum(needs) / world * rng.choice([0.8, 1.0, 1.03, 1.2, 3.0])), rng.choice([1, 900]))
    config = PlannerConfig("exact", family=family, max_degree=most)
    return make_planner(config, table, memory, topology, heads, cap), GlobalBatch.of(0, 0, samples)


def proven_impossible(made: BatchPlanner, what: GlobalBatch) -> bool:
    """By a sequence without option, or by an integer program over the same options."""
    if any(not made.menu.choices(sequence.bucket) for sequence in what.sequences):
        return True
    problem, _ = made.problem(what)
    return place_anchors(problem, 0.0, SolverLimits(deterministic_limit=20.0)).statuses == ("INFEASIBLE",)


@pytest.mark.parametrize("world", range(1, 34))
def test_a_checked_plan_or_a_proven_error(world: int) -> None:
    for draw in range(2):
        made, what = draw_planner(random.Random(f"{world}/{draw}"), world)
        try:
            plan = made.plan(what)
        except PlanningError:
            assert proven_impossible(made, what), draw
            continue
        problem, brief = made.problem(what)
        solution = made.solve(problem, brief)  # again, and the same
        again = assemble(what, problem, brief, solution, 7)
        assert again.digest == plan.digest
        claims = {"makespan": plan.makespan_us, "bound": plan.lower_bound_us, "splits": plan.num_splits}
        verdict = check(plain(problem), placements(problem, solution.cells), claims)
        assert verdict.faults == (), draw
        assert verdict.area_bound <= plan.lower_bound_us
        assert list(plan.loads_us) == sums(problem, solution.cells)[0]


def permuted(problem: PlacementProblem, image: list[int]) -> PlacementProblem:
    groups = []
    for group in problem.groups:
        choices = [
            replace(
                c, rank_sets=tuple(sorted(tuple(sorted(image[r] for r in ranks)) for ranks in c.rank_sets))
            )
            for c in group.choices
        ]
        groups.append(replace(group, choices=tuple(choices)))
    return replace(problem, groups=tuple(groups))


def test_renaming_ranks_changes_no_makespan() -> None:
    for number, problem in enumerate(feasible(15)):
        image = list(range(problem.world_size))
        random.Random(number).shuffle(image)
        makespan, bound, splits = solved(problem)
        other, lower, fewest = solved(permuted(problem, image))
        assert other <= makespan + int(bound * 1e-3)
        assert makespan <= other + int(lower * 1e-3)
        assert fewest == splits


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda p: p["name"])
def test_stage_1_of_the_paper_is_the_optimum_of_its_anchors(instance: dict[str, object]) -> None:
    """Anchors alone, by the literal two rounds and by the search, which share no code."""
    problem = read_problem(instance)
    if not all(group.choices for group in problem.groups):
        return
    brief = make_brief(problem, PlannerConfig("paper"))
    anchors = replace(problem, groups=tuple(problem.groups[g] for g in sorted(brief.anchors)))
    result = place_anchors(anchors, 1e-3, SolverLimits())
    if result.statuses == ("INFEASIBLE",):
        with pytest.raises(PlanningError):
            solved(anchors)
        return
    assert result.is_certified
    if anchors.groups:
        makespan, bound, splits = solved(anchors)
        assert bound <= result.best_us <= makespan <= result.best_us * 1.001 + 1
        assert splits == num_splits(result.cells)
    with suppress(FillerOverflowError, PlanningError):  # fillers that do not pack: the paper's own failure
        assert max(sums(problem, solve_paper(problem, brief).cells)[0]) >= result.best_us


@pytest.mark.parametrize("instance", INSTANCES, ids=lambda p: p["name"])
def test_eq_8_alone_packs_as_recorded(instance: dict[str, object]) -> None:
    """Every sequence whole: the filler rule by itself against the recorded makespan."""
    expected = instance["eq8_all_whole"]
    problem = read_problem(instance)
    if expected is None or not all(group.whole for group in problem.groups):
        return
    loads, memory = [0] * problem.world_size, [0] * problem.world_size
    groups = [FillerGroup(g.members, g.whole.price_us, g.whole.memory_mib) for g in problem.groups if g.whole]
    total = sum(len(g.members) * g.price_us for g in groups)
    if expected == "fails":
        with pytest.raises(FillerOverflowError):
            pack_fillers(groups, loads, memory, total, problem.cap_mib)
        return
    pack_fillers(groups, loads, memory, total, problem.cap_mib)
    assert max(loads) == expected


def test_a_profile_of_another_topology_has_no_options_here() -> None:
    """Measured on one node of four; used on pairs of ranks in nodes of one."""
    one_node = draw_table(random.Random(1), Topology.uniform(4), 12, "aligned", 4)
    made = make_planner(
        PlannerConfig("exact"), one_node, MemoryModel(GEOMETRY), Topology.uniform(4, 1), 12, 10**6
    )
    plan = made.plan(GlobalBatch.of(0, 0, [("a", one_node.buckets[0])] * 5))
    assert plan.num_splits == 0
    tiny = make_planner(
        PlannerConfig("exact"), one_node, MemoryModel(GEOMETRY), Topology.uniform(4, 1), 12, 1
    )
    with pytest.raises(PlanningError, match="fits no option under the cap of 1 MiB"):
        tiny.plan(GlobalBatch.of(0, 0, [("a", one_node.buckets[0])]))
    with pytest.raises(ConfigError, match="0 MiB"):
        make_planner(PlannerConfig("exact"), one_node, MemoryModel(GEOMETRY), Topology.uniform(4), 12, 0)
