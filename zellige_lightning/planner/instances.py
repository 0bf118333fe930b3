"""Plain placement problems as JSON: what the command line reads, and what the checker understands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.cut import cut_index
from zellige_lightning.planner.options import legal_rank_sets
from zellige_lightning.planner.planner import PlannerConfig
from zellige_lightning.planner.problem import Cell, Choice, Group, PlacementProblem, RankSet, drop_dominated
from zellige_lightning.planner.solution import Brief

_FAMILY = {"all": "all", "aligned": "aligned", "contig": "contiguous"}
_MOST = 1 << 40


def read_problem(data: Mapping[str, Any]) -> PlacementProblem:
    """A problem from its plain form. Options above the cap are no options.

    Raises:
        ConfigError: a missing or wrong field, names the problem and the field.
    """
    name = data.get("name", "unnamed") if isinstance(data, Mapping) else repr(data)
    try:
        world, cap = _integer(data["ranks"], "ranks"), _integer(data["cap"], "cap")
        topology = Topology.uniform(world)
        groups, start = [], 0
        for sequence in data["sequences"]:
            count = _integer(sequence["count"], "count")
            choices = [_choice(option, topology) for option in sequence["options"]]
            fitting = drop_dominated([c for c in choices if c.memory_mib <= cap])
            groups.append(Group(str(sequence["id"]), tuple(range(start, start + count)), fitting))
            start += count
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"problem {name!r}: {type(error).__name__} {error}",
            fix="a problem has ranks, cap and sequences, each with id, count and options of config, time, "
            "memory and rank_sets",
        ) from error
    return PlacementProblem(world, cap, tuple(groups))


def _integer(value: Any, name: str, low: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= _MOST:
        raise ValueError(f"{name} = {value!r} is not an integer from {low} to {_MOST}")
    return value


def _choice(option: Mapping[str, Any], topology: Topology) -> Choice:
    q, h, k = (_integer(x, "config") for x in option["config"])
    config = ParallelConfig(q, h, k)
    time, memory = _integer(option["time"], "time"), _integer(option["memory"], "memory", 0)
    start = _integer(option.get("start", 0), "start", 0)
    rank_sets = _rank_sets(option["rank_sets"], config.degree, topology)
    return Choice(config, time, memory, rank_sets, start_us=start)


def _rank_sets(sets: Any, degree: int, topology: Topology) -> tuple[RankSet, ...]:
    if isinstance(sets, str):
        if sets not in _FAMILY:
            raise ValueError(f"rank_sets = {sets!r} is none of {sorted(_FAMILY)}")
        found = legal_rank_sets(topology, degree, _FAMILY[sets])
    else:
        found = tuple(sorted(tuple(_integer(r, "rank", 0) for r in ranks) for ranks in sets))
    for ranks in found:
        if list(ranks) != sorted(set(ranks)) or len(ranks) != degree or ranks[-1] >= topology.world_size:
            raise ValueError(f"rank set {list(ranks)} does not hold {degree} ascending ranks of the world")
    if not found:
        raise ValueError(f"an option of degree {degree} has no rank set on {topology.world_size} ranks")
    return found


def make_brief(problem: PlacementProblem, config: PlannerConfig) -> Brief:
    """The problem's own sequences are the catalog of Eq. (4). Where nothing is whole, the least area
    stands in."""
    whole = [g.whole.price_us if g.whole else min(c.area_us for c in g.choices) for g in problem.groups]
    prices = sorted(whole)
    threshold = prices[k - 1] if prices and (k := cut_index(prices)) else 0
    anchors = frozenset(g for g, price in enumerate(whole) if price > threshold)
    return Brief(config, anchors, tuple(whole))


def placements(problem: PlacementProblem, cells: tuple[Cell, ...]) -> list[dict[str, Any]]:
    """Cells in plain form, as the checker reads them."""
    rows = []
    for cell in cells:
        group = problem.groups[cell.group]
        config = group.choices[cell.choice].config
        rows.append(
            {
                "id": group.bucket,
                "config": [config.q, config.h, config.k],
                "ranks": list(cell.ranks),
                "count": cell.count,
            }
        )
    return rows


def plain(problem: PlacementProblem) -> dict[str, Any]:
    """A problem in plain form, its rank sets listed."""
    sequences = [
        {
            "id": group.bucket,
            "count": len(group),
            "options": [
                {
                    "config": [c.config.q, c.config.h, c.config.k],
                    "time": c.price_us,
                    "memory": c.memory_mib,
                    "start": c.start_us,
                    "rank_sets": [list(r) for r in c.rank_sets],
                }
                for c in group.choices
            ],
        }
        for group in problem.groups
    ]
    return {"ranks": problem.world_size, "cap": problem.cap_mib, "sequences": sequences}
