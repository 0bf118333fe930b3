"""Ranks of unequal speed: a whole sequence takes longer on a slow rank, a split one goes at the pace of its
slowest rank, and what is proven holds against every placement."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from tests.planner.toys import BUCKETS, HEADS, MEMORY, batch, choice, problem, table
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.bounds import area_bound, area_bound_at
from zellige_lightning.planner.checker import check, exhaust
from zellige_lightning.planner.config import PlannerConfig
from zellige_lightning.planner.exact import solve_exact
from zellige_lightning.planner.instances import make_brief, placements, plain
from zellige_lightning.planner.menu import OptionMenu
from zellige_lightning.planner.paper import solve_joint
from zellige_lightning.planner.planner import BatchPlanner
from zellige_lightning.planner.problem import Choice, PlacementProblem, slowed
from zellige_lightning.planner.solution import sums

EXACT = PlannerConfig("exact")


def split_by_slowness(choice: Choice, slowness: tuple[int, ...]) -> list[Choice]:
    """By hand what `OptionMenu` does: one choice per rank set."""
    return [
        replace(
            choice,
            price_us=slowed(choice.price_us, max(slowness[r] for r in ranks)),
            rank_sets=(ranks,),
            nominal_us=choice.price_us,
        )
        for ranks in choice.rank_sets
    ]


def slow_problem(
    slowness: tuple[int, ...], groups: list[tuple[int, int, int]], cap_mib: int
) -> PlacementProblem:
    """Groups as (count, whole price, memory); splits cost a little more in total."""
    world, made = len(slowness), []
    for count, price, memory in groups:
        degrees = [d for d in (1, 2, 4) if d <= world]
        options = [choice(d, price // d + 3 * (d > 1), -(-memory // d), world) for d in degrees]
        made.append((count, [c for o in options for c in split_by_slowness(o, slowness)]))
    return replace(problem(world, cap_mib, *made), slowness=slowness)


small = st.lists(
    st.tuples(st.integers(1, 2), st.integers(4, 90), st.integers(1, 9)), min_size=1, max_size=3
).filter(lambda groups: sum(count for count, *_ in groups) <= 4)
speeds = st.lists(st.sampled_from([800, 1000, 1250, 1700]), min_size=2, max_size=4)


@settings(max_examples=60, deadline=None)
@given(small, speeds)
def test_the_search_finds_the_optimum_of_unequal_ranks(
    groups: list[tuple[int, int, int]], speed: list[int]
) -> None:
    given = slow_problem(tuple(speed), groups, 20)
    best, fewest = exhaust(plain(given), 0.0)
    solution = solve_exact(given, make_brief(given, replace(EXACT, epsilon=0.0)))
    verdict = check(plain(given), placements(given, solution.cells), {"bound": solution.bound_us})
    assert not verdict.faults
    assert (verdict.makespan, verdict.num_splits) == (best, fewest)
    assert solution.bound_us <= best
    assert area_bound(given) <= best and area_bound_at(given) <= best


@pytest.mark.parametrize("speed", [(1000, 1600), (1000, 1000, 1000, 2000), (1300, 900, 1000, 1000)])
def test_light_sequences_are_packed_by_speed_and_the_bound_is_tight(speed: tuple[int, ...]) -> None:
    random.seed(3)
    groups = [(random.randint(20, 60), random.randint(500, 900), 1) for _ in range(4)]
    given = slow_problem(speed, groups, 10_000)
    solution = solve_exact(given, make_brief(given, EXACT))
    verdict = check(plain(given), placements(given, solution.cells), {"bound": solution.bound_us})
    assert not verdict.faults
    assert verdict.makespan <= 1.005 * solution.bound_us
    # an even deal would give the slowest rank its nominal share, times its slowness
    assert verdict.makespan < 0.9 * max(speed) / 1000 * area_bound(replace(given, slowness=()))


def test_rescaling_prices_rescales_the_plan() -> None:
    groups = [(3, 500, 4), (30, 70, 1)]
    given = slow_problem((1000, 1500), groups, 1000)
    scaled = slow_problem((1000, 1500), [(n, 10 * price, m) for n, price, m in groups], 1000)
    first, second = (solve_exact(p, make_brief(p, EXACT)) for p in (given, scaled))
    load, other = (max(sums(p, s.cells)[0]) for p, s in ((given, first), (scaled, second)))
    assert abs(other - 10 * load) <= 0.002 * other


def slow_planner(world: int, slowness: tuple[int, ...], name: str = "exact") -> BatchPlanner:
    topology = Topology.uniform(world)
    menu = OptionMenu(table(world), MEMORY, topology, HEADS, 60_000, "aligned", None, slowness)
    return BatchPlanner(PlannerConfig(name), menu)


@pytest.mark.parametrize("world", [2, 8])
def test_a_slow_rank_gets_less(world: int) -> None:
    slowness = (*[1000] * (world - 1), 1500)
    whole = batch({"i256": 40 * world, "i720": 2 * world})
    even, skewed = slow_planner(world, ()).plan(whole), slow_planner(world, slowness).plan(whole)
    rows = [zip(whole.sequences, plan.options, strict=True) for plan in (even, skewed)]
    tokens = [sum(s.num_tokens for s, o in row if world - 1 in o.ranks) for row in rows]
    assert tokens[1] < 0.85 * tokens[0]
    assert skewed.gap < 0.01
    if world == 2:
        joint = slow_planner(world, slowness, "joint").plan(whole)
        assert joint.makespan_us == pytest.approx(skewed.makespan_us, rel=2e-3)


def test_equal_ranks_are_planned_as_ever() -> None:
    whole = batch(dict.fromkeys(BUCKETS, 3))
    plain_plan = slow_planner(4, ()).plan(whole)
    assert slow_planner(4, (1000,) * 4).plan(whole).digest == plain_plan.digest


def test_many_ranks_with_a_slow_one() -> None:
    world = 96
    slowness = tuple(1500 if r == 70 else 1000 for r in range(world))
    whole = batch({"i256": 40 * world, "i720": 6 * world, "v480": world // 4})
    plan = slow_planner(world, slowness).plan(whole)
    mean = sum(plan.loads_us) / world
    work = [load * 1000 / slow for load, slow in zip(plan.loads_us, slowness, strict=True)]
    assert work[70] < 0.75 * mean and plan.gap < 0.05


def test_joint_agrees_on_a_tiny_problem() -> None:
    given = slow_problem((1000, 1400, 1000, 1000), [(2, 80, 3), (3, 31, 2)], 20)
    brief = make_brief(given, replace(EXACT, epsilon=0.0))
    assert solve_joint(given, brief).bound_us == max(sums(given, solve_exact(given, brief).cells)[0])
