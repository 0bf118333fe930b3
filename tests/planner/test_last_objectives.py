"""Among placements of equal makespan and splits: few rank sets, then few bytes, cheap links first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.toys import BUCKETS, GEOMETRY, HEADS, MEMORY, batch, choice, problem, table
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.consolidate import spare_links
from zellige_lightning.planner.cost import ProfileTable
from zellige_lightning.planner.planner import PlannerConfig, make_planner
from zellige_lightning.planner.problem import Cell, Choice, drop_dominated
from zellige_lightning.planner.solution import sums
from zellige_lightning.planner.traffic import CROSS_NODE, traffic

KV = 2 * HEADS * 128 * 2  # bytes of one token's k and v


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        ((1, 1, 1), 0),
        ((1, 4, 1), 2 * 100 * 3 / 4),  # q, k, v, o: three quarters of every shard leave
        ((4, 1, 1), 100 * 3),  # every shard's k and v go to three others
        ((1, 1, 4), 100 * 3),
        ((2, 2, 1), 2 * 100 / 2 + 100),
        ((1, 2, 2), 2 * 100 / 2 + 100),
        ((2, 1, 2), 100 + 2 * 100),  # gathered k and v go round
    ],
)
def test_traffic_by_hand(config: tuple[int, int, int], rows: float) -> None:
    assert traffic(GEOMETRY, 100, ParallelConfig(*config), "node") == rows * KV
    assert traffic(GEOMETRY, 100, ParallelConfig(*config), "2+2") == rows * KV * CROSS_NODE


def sent(traffic_bytes: int, *ranks: tuple[int, ...], config: ParallelConfig | None = None) -> Choice:
    made = replace(choice(2, 10, 1, 4, list(ranks)), traffic=traffic_bytes)
    return replace(made, config=config) if config else made


def test_of_equal_choices_the_one_with_fewer_bytes_stays() -> None:
    ring, ulysses = sent(9, (0, 1), config=ParallelConfig(1, 1, 2)), sent(4, (0, 1))
    assert drop_dominated([ring, ulysses]) == (ulysses,)
    lean = replace(ring, memory_mib=0)
    assert drop_dominated([lean, ulysses]) == (lean,)  # bytes decide between equals only


def test_sequences_leave_dear_links_where_time_allows() -> None:
    across, inside = sent(80, (1, 2)), sent(10, (0, 1), (2, 3))
    toy = problem(4, 100, (1, [across, inside]), (2, [choice(1, 5, 1, 4)]))
    cells = (Cell(0, 0, (1, 2), 1), Cell(1, 0, (0,), 1), Cell(1, 0, (3,), 1))
    moved = spare_links(toy, cells, 15)
    assert moved[0] == Cell(0, 1, (0, 1), 1)
    assert max(sums(toy, moved)[0]) == 15
    assert spare_links(toy, cells, 14) == cells
    assert spare_links(replace(toy, cap_mib=1), cells, 15) == cells


def test_no_rank_set_is_added_for_fewer_bytes() -> None:
    """Another sequence still needs the pair (1, 2)."""
    across, inside = sent(80, (1, 2)), sent(10, (0, 1))
    toy = problem(4, 100, (1, [across, inside]), (1, [across]))
    cells = (Cell(0, 0, (1, 2), 1), Cell(1, 0, (1, 2), 1))
    assert spare_links(toy, cells, 20) == cells
    shared = problem(4, 100, (1, [across, inside]), (1, [across]), (1, [inside]))
    three = (*cells, Cell(2, 0, (0, 1), 1))
    assert spare_links(shared, three, 30)[0] == Cell(0, 1, (0, 1), 1)


def test_where_links_cost_no_time_the_plan_still_keeps_sets_inside_nodes() -> None:
    """Nodes of three: pairs (2, 3) cross, at the same price as the others."""
    flat = table(6)
    prices = dict(flat.prices_us)
    for (name, config, _), price in flat.prices_us.items():
        for where in ("1+1", "2+1", "2+2", "3+2", "3+3"):
            prices[name, config, where] = price
    known = ProfileTable(flat.buckets, prices, {}, 0, {})
    topology = Topology.uniform(6, 3)
    made = make_planner(PlannerConfig("exact", max_degree=2), known, MEMORY, topology, HEADS, 60_000)
    plan = made.plan(batch({"v720": 1, "i256": 4}))
    split = [option for option in plan.options if not option.config.is_whole]
    assert [topology.class_of(option.ranks) for option in split] == ["node"]
    assert BUCKETS["v720"].num_tokens > 100_000
