"""Placements where a call that split sequences share costs something to start."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.planner import toys
from zellige_lightning.placement.plan import WHOLE, ParallelConfig
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.checker import check, exhaust
from zellige_lightning.planner.cost import ProfileTable
from zellige_lightning.planner.exact import solve_exact
from zellige_lightning.planner.instances import make_brief, placements, plain, read_problem
from zellige_lightning.planner.planner import PlannerConfig, make_planner
from zellige_lightning.planner.problem import Cell, PlacementProblem, drop_dominated
from zellige_lightning.planner.solution import Account, Solution, num_splits, sums

ULYSSES, GATHER = ParallelConfig(1, 2, 1), ParallelConfig(2, 1, 1)


def sequence(name: str, count: int, whole: int, start: int, gather: int = 0) -> dict[str, Any]:
    """Halves cost half; gathering costs `gather` more, a shared call its start."""
    options = [
        {"config": [1, 1, 1], "time": whole, "memory": 10, "rank_sets": "all"},
        {"config": [1, 2, 1], "time": whole // 2, "memory": 5, "rank_sets": "contig", "start": start},
    ]
    if gather:
        options.append({"config": [2, 1, 1], "time": whole // 2 + gather, "memory": 6, "rank_sets": "contig"})
    return {"id": name, "count": count, "options": options}


def problem(ranks: int, *sequences: dict[str, Any], cap: int = 1000) -> dict[str, Any]:
    return {"ranks": ranks, "cap": cap, "sequences": list(sequences)}


def solved(data: dict[str, Any]) -> tuple[PlacementProblem, Solution]:
    """The solution, after the checker agreed."""
    made = read_problem(data)
    solution = solve_exact(made, make_brief(made, PlannerConfig("exact")))
    claims = {
        "makespan": max(sums(made, solution.cells)[0]),
        "bound": solution.bound_us,
        "splits": num_splits(solution.cells),
    }
    assert check(data, placements(made, solution.cells), claims).faults == ()
    return made, solution


def configs(made: PlacementProblem, solution: Solution) -> dict[str, set[ParallelConfig]]:
    found: dict[str, set[ParallelConfig]] = {}
    for cell in solution.cells:
        group = made.groups[cell.group]
        found.setdefault(group.bucket, set()).add(group.choices[cell.choice].config)
    return found


def test_a_start_is_paid_once_for_each_configuration_and_rank_set() -> None:
    made = read_problem(problem(4, sequence("a", 3, 40, 7), sequence("b", 2, 20, 7)))
    account = Account(made, [Cell(0, 1, (0, 1), 2), Cell(1, 1, (0, 1), 1), Cell(0, 1, (1, 2), 1)])
    assert account.loads_us == [57, 84, 27, 0]
    account.add((0, 1, (0, 1)), -2)
    assert account.loads_us == [17, 44, 27, 0]
    account.add((1, 1, (0, 1)), -1)
    account.add((0, 1, (1, 2)), -1)
    assert account.loads_us == [0, 0, 0, 0] and account.counts == {} and account.memory_mib == [0, 0, 0, 0]


def test_a_lone_short_sequence_stays_whole_where_its_call_costs_more_than_it_saves() -> None:
    """The price alone would have it split: 55 against 60."""
    video, image = sequence("video", 1, 100, 30, gather=2), sequence("image", 1, 10, 30)
    made, solution = solved(problem(2, video, image))
    assert configs(made, solution) == {"video": {GATHER}, "image": {WHOLE}}
    free = problem(2, sequence("video", 1, 100, 0, gather=2), sequence("image", 1, 10, 0))
    assert configs(*solved(free)) == {"video": {ULYSSES}, "image": {ULYSSES}}


def test_what_shares_a_call_shares_its_start() -> None:
    """One start for all, which no single one of them would be worth: 5 of 7 whole against a split seventh."""
    made, solution = solved(problem(2, sequence("image", 7, 20, 8)))
    assert max(sums(made, solution.cells)[0]) == 78  # three whole on each rank, one of both
    made, solution = solved(problem(2, sequence("image", 7, 20, 12)))
    assert (max(sums(made, solution.cells)[0]), num_splits(solution.cells)) == (80, 0)
    many = problem(4, *(sequence(f"s{n}", 1, 100, 30) for n in range(6)))
    made, solution = solved(many)
    assert max(sums(made, solution.cells)[0]) == exhaust(many)[0]  # type: ignore[index]
    assert len({cell.ranks for cell in solution.cells if len(cell.ranks) > 1}) == 2  # not a call for each


def test_memory_may_need_a_split_that_does_not_pay() -> None:
    made, solution = solved(problem(2, sequence("image", 3, 10, 500), cap=15))
    assert num_splits(solution.cells) == 1
    assert max(sums(made, solution.cells)[0]) == 515


@pytest.mark.parametrize("seed", range(40))
def test_random_placements_come_close_to_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    ranks, start = rng.choice((2, 2, 3, 4)), rng.choice((5, 30, 200))
    sequences, left = [], {2: 6, 3: 5, 4: 4}[ranks]
    for name in "ab":
        count = rng.randrange(1, 1 + left // 2)
        sequences.append(sequence(name, count, rng.choice((20, 90, 400)) + rng.randrange(9), start, start))
    data = problem(ranks, *sequences)
    made, solution = solved(data)
    best, _ = exhaust(data)  # type: ignore[misc]
    assert solution.bound_us <= best <= max(sums(made, solution.cells)[0]) <= 1.05 * best


def test_statuses_speak_of_the_makespan_with_starts() -> None:
    _, solution = solved(problem(2, sequence("image", 7, 20, 8)))
    assert solution.bound_us == 70 and solution.statuses == ("OPEN", "OPEN")
    _, solution = solved(problem(2, sequence("image", 6, 20, 8)))
    assert solution.statuses == ("OPTIMAL", "OPTIMAL")


def test_starts_far_below_the_makespan_change_nothing() -> None:
    with_starts = problem(4, sequence("v", 3, 100_000, 9, gather=50), sequence("i", 30, 1_000, 9))
    without = problem(4, sequence("v", 3, 100_000, 0, gather=50), sequence("i", 30, 1_000, 0))
    assert solved(with_starts)[1].cells == solved(without)[1].cells


def started(world: int) -> ProfileTable:
    """Toy prices where heads are the cheapest thing to split, if a call is there already."""
    prices = toys.table(world)
    packed = {key[1:] for key in prices.prices_us if key[1].is_packed and not key[1].is_whole}
    cheaper = {key: us - 25 * (key[1:] in packed) for key, us in prices.prices_us.items()}
    return replace(prices, prices_us=cheaper, start_us={key: 450 * key[0].h for key in packed})


@pytest.mark.parametrize(
    ("name", "layout"), [("exact", ""), ("paper", ""), ("joint", ""), ("usp", "u4r1"), ("knapformer", "g4n1")]
)
def test_every_planner_predicts_starts(name: str, layout: str) -> None:
    """Loads of the plan are what the table says of its options."""
    prices, topology = started(4), Topology.uniform(4)
    config = PlannerConfig.of({"name": name, "family": "contiguous"} | ({"layout": layout} if layout else {}))
    made = make_planner(config, prices, toys.MEMORY, topology, toys.HEADS, 60_000)
    what = toys.batch({"v720": 1, "v480": 3, "i720": 9, "i256": 20})
    plan = made.plan(what)
    starts = prices.start_loads_us(plan.options, topology)
    loads = list(starts)
    for sequence_, option in zip(what.sequences, plan.options, strict=True):
        price = prices.price_us(sequence_.bucket, option.config, "node")
        assert price is not None
        for rank in option.ranks:
            loads[rank] += price
    assert plan.loads_us == tuple(loads)
    assert starts == [1800] * 4 or not layout


def test_a_slow_rank_starts_slowly_too() -> None:
    made = make_planner(PlannerConfig("exact"), started(2), toys.MEMORY, Topology.uniform(2), 12, 60_000)
    made.menu = replace(made.menu, slowness=(1000, 1500))
    starts = {c.config: c.start_us for c in made.problem(toys.batch({"v720": 1}))[0].groups[0].choices}
    assert starts[ULYSSES] == 1350 and set(starts.values()) == {0, 1350}


def test_a_choice_is_dropped_only_for_one_that_starts_as_cheaply() -> None:
    ulysses, gather = (toys.choice(2, price, 10, 2) for price in (50, 60))
    gather = replace(gather, config=GATHER)
    for start, kept in ((0, {ULYSSES}), (10, {ULYSSES}), (11, {ULYSSES, GATHER})):
        found = drop_dominated([replace(ulysses, start_us=start), gather])
        assert {choice.config for choice in found} == kept
    found = drop_dominated([replace(ulysses, start_us=9), replace(gather, price_us=50)])
    assert [choice.config for choice in found] == [GATHER]


def test_the_plain_form_keeps_starts() -> None:
    data = problem(2, sequence("a", 1, 100, 30))
    assert plain(read_problem(data))["sequences"][0]["options"][1]["start"] == 30


Times = dict[int, tuple[int, int]]  # by degree: one more sequence under (1, h, 1), a sequence under (q, 1, 1)


def makespan(ranks: int, start: int, *rows: tuple[int, int, Times]) -> int:
    """Of (count, whole time, times) on contiguous ranks; the start of a call is `start` + degree."""
    sequences = []
    for count, whole, times in rows:
        options: list[dict[str, Any]] = [{"config": [1, 1, 1], "time": whole}]
        for degree, (packed, gathered) in times.items():
            options.append({"config": [1, degree, 1], "time": packed, "start": start + degree})
            options.append({"config": [degree, 1, 1], "time": gathered})
        family = [{**option, "memory": 1, "rank_sets": "contig"} for option in options]
        sequences.append({"id": str(whole), "count": count, "options": family})
    made, solution = solved(problem(ranks, *sequences))
    return max(sums(made, solution.cells)[0])


def test_loads_are_evened_out_behind_the_starts() -> None:
    """Neither search knows on which ranks a start is paid once: 698 where they put everything."""
    rows: list[tuple[int, int, Times]] = [
        (6, 304, {2: (153, 189), 4: (79, 106), 8: (38, 72)}),
        (3, 902, {2: (454, 486), 4: (226, 256), 8: (114, 145)}),
        (4, 45, {2: (23, 55), 4: (12, 45), 8: (5, 42)}),
        (1, 302, {2: (151, 184), 4: (78, 112), 8: (40, 67)}),
    ]
    assert makespan(8, 30, *rows) <= 682


def test_a_block_whose_sequences_take_less_time_whole_is_dissolved() -> None:
    """Neither search alone finds it: 679 with all blocks kept."""
    rows: list[tuple[int, int, Times]] = [
        (count, whole, {d: (whole // d + 1, whole // d + 60) for d in (2, 4)})
        for count, whole in ((2, 907), (1, 301), (2, 45))
    ]
    assert makespan(4, 60, *rows) <= 639
