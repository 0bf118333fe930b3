"""Many ranks: the world is cut into pods of neighbouring ranks, the batch is dealt to the pods by counts,
and each pod is searched on its own for one common target.

Placements across pods are left out, the bound is that of the whole problem, and the gap says what this costs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

from zellige_lightning.planner.bounds import area_bound_at
from zellige_lightning.planner.compiled import buffer, zeros
from zellige_lightning.planner.decider import NO_BUDGET, Attempt, Decider, light_groups
from zellige_lightning.planner.problem import NOMINAL, Cell, Choice, Group, PlacementProblem, RankSet
from zellige_lightning.planner.sand import relieve_ranks
from zellige_lightning.planner.sand_kernel import pack_group
from zellige_lightning.planner.search_kernel import UNKNOWN
from zellige_lightning.planner.solution import sums

MOST_STEPS, CLOSING_STEPS = 14, 2
POD_RANKS = 32, 48  # where what weighs most is split by a power of two, and where in three parts
GOOD_GAP = 0.01  # another size of pods is tried above it


@dataclass(frozen=True)
class Pod:
    """`problem` renumbers the pod's ranks from 0; `origin[g][j]` is the choice of the whole problem."""

    start: int
    problem: PlacementProblem
    origin: tuple[tuple[int, ...], ...]


def cut_world(world: int, size: int) -> list[range]:
    """Ranges of `size` ranks; the last pod takes the rest."""
    starts = [n * size for n in range(max(1, round(world / size)))] + [world]
    return [range(a, b) for a, b in itertools.pairwise(starts)]


def pod_sizes(problem: PlacementProblem, target: int) -> list[int]:
    """Ranks of a pod, the best first: those that the rank sets of the heaviest group fill, at its first
    degree whose price stays within `target`."""

    def weight(group: Group) -> int:
        return len(group) * min(c.area_us for c in group.choices)

    choices = max(problem.groups, key=weight).choices
    degree = min((c.config.degree for c in choices if c.price_us <= target), default=1)
    return sorted(POD_RANKS, key=lambda size: size % degree != 0)


def _sets_by_pod(rank_sets: tuple[RankSet, ...], pods: list[range]) -> list[tuple[RankSet, ...]]:
    """Per pod the rank sets inside it, renumbered."""
    inside: list[list[RankSet]] = [[] for _ in pods]
    last = len(pods) - 1
    for ranks in rank_sets:
        pod = min(ranks[0] // len(pods[0]), last)
        if ranks[-1] < pods[pod].stop:
            start = pods[pod].start
            inside[pod].append(tuple(r - start for r in ranks))
    return [tuple(sets) for sets in inside]


def _deal(problem: PlacementProblem, pods: list[range], target: int) -> list[list[int]]:
    """Members of each group per pod, dearest groups first, by the score of Eq. (8) over pods.

    A pod smaller than the largest starts with the load and memory of the ranks that it lacks, one with a slow
    rank with the load that this rank cannot take.
    """
    size = max(map(len, pods))
    loads, memory = zeros(len(pods)), zeros(len(pods))
    for n, pod in enumerate(pods):
        offered = sum(target * NOMINAL // problem.slowness_by_rank[r] for r in pod)
        loads[n], memory[n] = size * target - offered, (size - len(pod)) * problem.cap_mib
    counts = [[0] * len(problem.groups) for _ in pods]
    for g, group in enumerate(problem.groups):
        choice = min(group.choices, key=lambda c: c.area_us)
        mib = choice.config.degree * choice.memory_mib
        row = zeros(len(pods))
        room = (size * target, size * problem.cap_mib)
        areas = buffer([choice.area_us] * len(pods))
        if not pack_group(len(group), areas, 0, 1, mib, *room, len(pods), loads, memory, row):
            return []
        for n in range(len(pods)):
            counts[n][g] = int(row[n])
    return counts


def _make_pods(problem: PlacementProblem, pods: list[range], counts: list[list[int]]) -> list[Pod] | None:
    inside = _Inside(pods)
    made = []
    for n, pod in enumerate(pods):
        menus = [inside.choices(group, n) for group in problem.groups]
        if any(count and not choices for count, (choices, _) in zip(counts[n], menus, strict=True)):
            return None
        rows = zip(problem.groups, counts[n], menus, strict=True)
        groups = tuple(Group(g.bucket, g.members[:count], menu[0], g.num_tokens) for g, count, menu in rows)
        origin = tuple(kept for _, kept in menus)
        slowness = problem.slowness[pod.start : pod.stop]
        made.append(Pod(pod.start, PlacementProblem(len(pod), problem.cap_mib, groups, slowness), origin))
    return made


@dataclass
class _Inside:
    """Choices of a group inside each pod; pods that look alike share one tuple of choices."""

    pods: list[range]
    _sets: dict[tuple[RankSet, ...], list[int]] = field(default_factory=dict)
    _distinct: dict[tuple[RankSet, ...], int] = field(default_factory=dict)
    _menus: dict[tuple[object, ...], tuple[tuple[Choice, ...], tuple[int, ...]]] = field(default_factory=dict)

    def choices(self, group: Group, pod: int) -> tuple[tuple[Choice, ...], tuple[int, ...]]:
        """The choices and their positions in `group.choices`."""
        numbers = tuple(self._number(choice.rank_sets, pod) for choice in group.choices)
        key = (group.bucket, id(group.choices), numbers)
        if key not in self._menus:
            listed = list(self._distinct)
            kept = [(j, listed[number]) for j, number in enumerate(numbers) if listed[number]]
            made = tuple(replace(group.choices[j], rank_sets=sets) for j, sets in kept)
            self._menus[key] = made, tuple(j for j, _ in kept)
        return self._menus[key]

    def _number(self, rank_sets: tuple[RankSet, ...], pod: int) -> int:
        """Equal numbers for equal rank sets inside a pod."""
        if rank_sets not in self._sets:
            found = _sets_by_pod(rank_sets, self.pods)
            self._sets[rank_sets] = [self._distinct.setdefault(s, len(self._distinct)) for s in found]
        return self._sets[rank_sets][pod]


def search_pods(
    problem: PlacementProblem, epsilon: float, node_limit: int
) -> tuple[int, list[Cell], int] | None:
    """(makespan, cells, bound) with every pod placed near the bound; None where some pod finds no placement.

    Light sequences move between pods in the end. Another size of pods is tried where one leaves much open.
    """
    bound, light = area_bound_at(problem), light_groups(problem, problem.num_sequences)
    lean, best = _kept_whole(problem, light), None
    for size in pod_sizes(problem, bound):
        cells = _fill(lean, cut_world(problem.world_size, size), bound, epsilon, node_limit)
        if cells is None:
            continue
        relieved = relieve_ranks(problem, cells, light, bound + int(bound * epsilon))
        makespan = max(sums(problem, relieved)[0])
        if best is None or makespan < best[0]:
            best = makespan, list(relieved), bound
        if makespan <= bound + int(bound * GOOD_GAP):
            break
    return best


def _fill(
    problem: PlacementProblem, pods: list[range], bound: int, epsilon: float, node_limit: int
) -> list[Cell] | None:
    """The target starts just above the bound. A pod that misses it raises it for the others, whose loads do
    not matter below the largest."""
    counts = _deal(problem, pods, bound)
    made = _make_pods(problem, pods, counts) if counts else None
    if made is None:
        return None
    target, cells = bound + int(bound * epsilon / 2), []
    known: dict[tuple[object, ...], Attempt] = {}
    for pod in made:
        key = (pod.problem.slowness, *((len(g), id(g.choices)) for g in pod.problem.groups))
        answer = known.get(key) or _place(pod.problem, target, epsilon, node_limit)
        if answer is None or answer.makespan_us is None:
            return None
        known[key] = answer
        target = max(target, answer.makespan_us)
        for cell in answer.cells:
            ranks = tuple(r + pod.start for r in cell.ranks)
            cells.append(Cell(cell.group, pod.origin[cell.group][cell.choice], ranks, cell.count))
    return cells


def _kept_whole(problem: PlacementProblem, light: tuple[int, ...]) -> PlacementProblem:
    """Without the splits of light groups, which pods have no use for: nothing is proven about pods. The
    dropped choices leave empty rank sets, so that positions stay."""
    groups = list(problem.groups)
    for g in light:
        choices = (c if c.config.is_whole else replace(c, rank_sets=()) for c in groups[g].choices)
        groups[g] = replace(groups[g], choices=tuple(choices))
    return replace(problem, groups=tuple(groups))


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
