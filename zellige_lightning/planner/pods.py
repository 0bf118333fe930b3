"""Many ranks: the world is cut into pods of neighbouring ranks, the batch is dealt to the pods by counts,
and each pod is searched on its own for one common target.

Placements across pods are left out, the bound is that of the whole problem, and the gap says what this costs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from zellige_lightning.planner.bounds import area_bound_at
from zellige_lightning.planner.compiled import zeros
from zellige_lightning.planner.decider import NO_BUDGET, Attempt, Decider, light_groups
from zellige_lightning.planner.problem import Cell, PlacementProblem, RankSet
from zellige_lightning.planner.sand_kernel import pack_group
from zellige_lightning.planner.search_kernel import UNKNOWN

MOST_STEPS, CLOSING_STEPS = 14, 4
POD_RANKS = 48  # divisible by nodes of 2, 4, 8, 16 ranks and by the degrees 2, 3, 4, 6, 8, 12, 16


@dataclass(frozen=True)
class Pod:
    """`problem` renumbers the pod's ranks from 0; `origin[g][j]` is the choice of the whole problem."""

    start: int
    problem: PlacementProblem
    origin: tuple[tuple[int, ...], ...]


def cut_world(world: int) -> list[range]:
    """Ranges of ranks; the last pod takes the rest."""
    number = max(1, round(world / POD_RANKS))
    starts = [n * POD_RANKS for n in range(number)] + [world]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def _sets_by_pod(rank_sets: tuple[RankSet, ...], pods: list[range]) -> list[tuple[RankSet, ...]]:
    """Per pod the rank sets inside it, renumbered."""
    inside: list[list[RankSet]] = [[] for _ in pods]
    last = len(pods) - 1
    for ranks in rank_sets:
        pod = min(ranks[0] // POD_RANKS, last)
        if ranks[-1] < pods[pod].stop:
            start = pods[pod].start
            inside[pod].append(tuple(r - start for r in ranks))
    return [tuple(sets) for sets in inside]


def _deal(problem: PlacementProblem, pods: list[range], target: int) -> list[list[int]]:
    """Members of each group per pod, dearest groups first, by the score of Eq. (8) over pods.

    A pod smaller than the largest starts with the load and memory of the ranks that it lacks.
    """
    size = max(map(len, pods))
    loads, memory = zeros(len(pods)), zeros(len(pods))
    for n, pod in enumerate(pods):
        loads[n], memory[n] = (size - len(pod)) * target, (size - len(pod)) * problem.cap_mib
    counts = [[0] * len(problem.groups) for _ in pods]
    for g, group in enumerate(problem.groups):
        choice = min(group.choices, key=lambda c: c.area_us)
        mib = choice.config.degree * choice.memory_mib
        row = zeros(len(pods))
        room = (size * target, size * problem.cap_mib)
        if not pack_group(len(group), choice.area_us, mib, *room, len(pods), loads, memory, row):
            return []
        for n in range(len(pods)):
            counts[n][g] = int(row[n])
    return counts


def _make_pods(problem: PlacementProblem, pods: list[range], counts: list[list[int]]) -> list[Pod] | None:
    by_sets: dict[int, list[tuple[RankSet, ...]]] = {}
    for group in problem.groups:
        for choice in group.choices:
            if id(choice.rank_sets) not in by_sets:
                by_sets[id(choice.rank_sets)] = _sets_by_pod(choice.rank_sets, pods)
    made = []
    for n, pod in enumerate(pods):
        groups, origin = [], []
        for g, group in enumerate(problem.groups):
            inside = [(j, by_sets[id(c.rank_sets)][n]) for j, c in enumerate(group.choices)]
            kept = [(j, sets) for j, sets in inside if sets]
            if counts[n][g] and not kept:
                return None
            choices = tuple(replace(group.choices[j], rank_sets=sets) for j, sets in kept)
            groups.append(replace(group, members=group.members[: counts[n][g]], choices=choices))
            origin.append(tuple(j for j, _ in kept))
        made.append(Pod(pod.start, PlacementProblem(len(pod), problem.cap_mib, tuple(groups)), tuple(origin)))
    return made


def search_pods(
    problem: PlacementProblem, epsilon: float, node_limit: int
) -> tuple[int, list[Cell], int] | None:
    """(makespan, cells, bound) with every pod placed near the bound; None where some pod finds no placement.

    The target starts just above the bound. A pod that misses it raises it for the others, whose loads do not
    matter below the largest.
    """
    bound = area_bound_at(problem)
    pods = cut_world(problem.world_size)
    counts = _deal(problem, pods, bound)
    made = _make_pods(problem, pods, counts) if counts else None
    if made is None:
        return None
    target, cells, worst = bound + int(bound * epsilon / 2), [], 0
    known: dict[tuple[object, ...], Attempt] = {}
    for pod in made:
        key = (tuple(map(len, pod.problem.groups)), tuple(g.choices for g in pod.problem.groups))
        answer = known.get(key) or _place(pod.problem, target, epsilon, node_limit)
        if answer is None or answer.makespan_us is None:
            return None
        known[key] = answer
        worst = max(worst, answer.makespan_us)
        target = max(target, worst)
        for cell in answer.cells:
            ranks = tuple(r + pod.start for r in cell.ranks)
            cells.append(Cell(cell.group, pod.origin[cell.group][cell.choice], ranks, cell.count))
    return worst, sorted(cells), bound


def _place(problem: PlacementProblem, target: int, epsilon: float, node_limit: int) -> Attempt | None:
    """The best attempt of targets that grow from `target` until one is met, then of a few between."""
    present = replace(problem, groups=tuple(g for g in problem.groups if len(g)))
    names = [n for n, g in enumerate(problem.groups) if len(g)]
    decider = Decider(present, light_groups(present, 256))
    best, low, step = Attempt(UNKNOWN), target, max(1, int(target * epsilon))
    for _ in range(MOST_STEPS):
        best = best.better(decider.attempt(target, NO_BUDGET, node_limit))
        if best.meets(target):
            break
        low, target, step = target + 1, target + step, 2 * step
    for _ in range(CLOSING_STEPS):
        if best.makespan_us is None or best.makespan_us <= low:
            break
        middle = (low + best.makespan_us) // 2
        best = best.better(decider.attempt(middle, NO_BUDGET, node_limit))
        if not best.meets(middle):
            low = middle + 1
    if best.makespan_us is None:
        return None
    return replace(best, cells=tuple(replace(c, group=names[c.group]) for c in best.cells))
