"""An independent check of placements: standard library only, and no line of the planners.

It works on plain problems, in the format that `python -m zellige_lightning.planner` reads: `ranks`, `cap`,
and `sequences`, each `count` identical ones with `options` of `config` [q, h, k], `time`, `memory` (per
participating rank) and `rank_sets` ("all", "aligned", "contig" or an explicit list). An option may have a
`start`: time that each rank of a set pays once for all sequences of that configuration on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

Problem = Mapping[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What a placement really is. `faults` is empty for a valid one; `area_bound` holds for every
    placement."""

    makespan: int
    largest_memory: int
    num_splits: int
    area_bound: int
    faults: tuple[str, ...]


def check(
    problem: Problem, placements: Iterable[Mapping[str, Any]], claims: Mapping[str, Any] | None = None
) -> Verdict:
    """Recomputes everything from `placements` (`id`, `config`, `ranks`, `count`) alone.

    `claims` may hold `makespan`, `bound`, `splits`; a claim that the placement contradicts is a fault.
    """
    loads, memory = [0] * problem["ranks"], [0] * problem["ranks"]
    sequences = {s["id"]: s for s in problem["sequences"]}
    placed, splits, faults = dict.fromkeys(sequences, 0), 0, []
    started = set()
    for placement in placements:
        name, ranks, count = placement["id"], tuple(placement["ranks"]), placement["count"]
        option = _option(sequences.get(name), placement["config"], ranks, problem["ranks"])
        if option is None or count < 1:
            faults.append(f"{name}: {placement['config']} on {ranks} x {count} is not an option")
            continue
        if len(ranks) != prod(option["config"]):
            faults.append(f"{name}: {option['config']} on {len(ranks)} ranks")
            continue
        placed[name] += count
        splits += count * (len(ranks) > 1)
        for rank in ranks:
            loads[rank] += count * option["time"]
            memory[rank] += count * option["memory"]
            loads[rank] += option.get("start", 0) * ((*option["config"], ranks) not in started)
        started.add((*option["config"], ranks))
    faults += [
        f"{n}: {k} of {sequences[n]['count']} placed" for n, k in placed.items() if k != sequences[n]["count"]
    ]
    if max(memory) > problem["cap"]:
        faults.append(f"memory {max(memory)} above the cap {problem['cap']}")
    verdict = Verdict(max(loads), max(memory), splits, area_bound(problem), ())
    faults += _contradictions(verdict, claims or {})
    return Verdict(verdict.makespan, verdict.largest_memory, splits, verdict.area_bound, tuple(faults))


def _option(
    sequence: Mapping[str, Any] | None, config: Any, ranks: tuple[int, ...], world: int
) -> Mapping[str, Any] | None:
    """One configuration may have several options, each for the rank sets of one topology class."""
    options = sequence["options"] if sequence else []
    same = (o for o in options if list(o["config"]) == list(config))
    return next((o for o in same if is_legal(ranks, o["rank_sets"], world)), None)


def _contradictions(verdict: Verdict, claims: Mapping[str, Any]) -> list[str]:
    faults = []
    if claims.get("makespan", verdict.makespan) != verdict.makespan:
        faults.append(f"claims a makespan of {claims['makespan']}, it is {verdict.makespan}")
    if claims.get("bound", 0) > verdict.makespan:
        faults.append(f"claims a bound of {claims['bound']} above the makespan {verdict.makespan}")
    if claims.get("splits", verdict.num_splits) != verdict.num_splits:
        faults.append(f"claims {claims['splits']} splits, there are {verdict.num_splits}")
    return faults


def is_legal(ranks: tuple[int, ...], rank_sets: Any, world: int) -> bool:
    """Whether `ranks` belong to the named or listed family."""
    if list(ranks) != sorted(set(ranks)) or not ranks or ranks[0] < 0 or ranks[-1] >= world:
        return False
    if not isinstance(rank_sets, str):
        return list(ranks) in [list(r) for r in rank_sets]
    neighbours = ranks[-1] - ranks[0] == len(ranks) - 1
    return {
        "all": True,
        "contig": neighbours,
        "aligned": neighbours and ranks[0] % len(ranks) == 0,
    }[rank_sets]


def area_bound(problem: Problem) -> int:
    """Sum of the least rank time of every sequence over all ranks; also the largest least time of any one."""
    area, largest = 0, 0
    for sequence in problem["sequences"]:
        usable = [o for o in sequence["options"] if o["memory"] <= problem["cap"]]
        if usable and sequence["count"]:
            area += sequence["count"] * min(prod(o["config"]) * o["time"] for o in usable)
            largest = max(largest, min(o["time"] for o in usable))
    return max(-(-area // problem["ranks"]), largest)


def exhaust(problem: Problem, epsilon: float = 1e-3) -> tuple[int, int] | None:
    """(optimum, fewest splits within epsilon of it) by trying every placement; None where none fits. Tiny
    only."""
    found: dict[int, int] = {}
    for makespan, splits in _every(problem):
        found[makespan] = min(splits, found.get(makespan, splits))
    if not found:
        return None
    best = min(found)
    return best, min(k for makespan, k in found.items() if makespan <= best + int(best * epsilon))


def _every(problem: Problem) -> Iterator[tuple[int, int]]:
    world, cap = problem["ranks"], problem["cap"]
    menus = [
        [
            (o["time"], o["memory"], ranks, (o.get("start", 0), tuple(o["config"])))
            for o in sequence["options"]
            for ranks in combinations(range(world), prod(o["config"]))
            if is_legal(ranks, o["rank_sets"], world)
        ]
        for sequence in problem["sequences"]
        for _ in range(sequence["count"])
    ]

    def walk(
        i: int, loads: list[int], memory: list[int], splits: int, started: frozenset[Any]
    ) -> Iterator[tuple[int, int]]:
        if i == len(menus):
            yield max(loads), splits
            return
        for time, mib, ranks, (start, config) in menus[i]:
            if all(memory[r] + mib <= cap for r in ranks):
                cost = time + start * ((config, ranks) not in started)
                more_loads = [load + cost * (r in ranks) for r, load in enumerate(loads)]
                more_memory = [held + mib * (r in ranks) for r, held in enumerate(memory)]
                now = started | {(config, ranks)}
                yield from walk(i + 1, more_loads, more_memory, splits + (len(ranks) > 1), now)

    yield from walk(0, [0] * world, [0] * world, 0, frozenset())
