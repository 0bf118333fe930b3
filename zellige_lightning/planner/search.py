"""The exact search: certified makespan, then certified fewest splits, over rocks and sand together.

A placement is searched for a target T; T is bisected from the best lower bound. See `search_kernel` for the
decision and `sand_kernel` for the packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zellige_lightning.planner.compiled import buffer, zeros
from zellige_lightning.planner.problem import Cell, Choice, Group, PlacementProblem
from zellige_lightning.planner.sand_kernel import pack_group, relieve
from zellige_lightning.planner.search_kernel import FEASIBLE, INFEASIBLE, UNKNOWN, decide
from zellige_lightning.planner.symmetry import block_swaps, twin_classes

MEMO_STATES = 1 << 13
NO_BUDGET = 1 << 40


@dataclass(frozen=True)
class Attempt:
    """Answer for one target. `makespan_us` and `cells` are set where rocks and sand were placed."""

    status: int
    makespan_us: int | None = None
    cells: tuple[Cell, ...] = ()


@dataclass
class Decider:
    """Buffers of one problem with a chosen set of sand groups; answers decisions.

    Args:
        sand: positions in `problem.groups` of the groups that are packed whole after the rocks.
    """

    problem: PlacementProblem
    sand: tuple[int, ...]
    nodes: int = 0
    _groups: list[tuple[int, Group, tuple[int, ...]]] = field(default_factory=list)
    _args: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        problem, sand = self.problem, set(self.sand)
        world = problem.world_size
        # choices by increasing area: the first one tried wastes the least
        self._groups = [
            (g, group, tuple(sorted(range(len(group.choices)), key=lambda j: _thrift(group.choices[j]))))
            for g, group in enumerate(problem.groups)
        ]
        items = [g for g, group in enumerate(problem.groups) if g not in sand for _ in group.members]
        choices = [group.choices[j] for _, group, order in self._groups for j in order]
        sets = [(j, ranks) for j, choice in enumerate(choices) for ranks in choice.rank_sets]
        families = {choice.rank_sets for choice in choices}
        twins, swaps = twin_classes(world, families), block_swaps(world, families)
        ratios = _conditions([(len(problem.groups[g]), self._whole(g)[1]) for g in self.sand])
        width = max((len(c.rank_sets) for c in choices), default=1)
        self.sizes = (world, len(items), len(problem.groups), len(ratios), len(swaps), MEMO_STATES, width)
        num_q = len(ratios)
        starts = [0]
        for _, group, _ in self._groups:
            starts.append(starts[-1] + len(group.choices))
        set_ptr, set_ranks = [0], [0]
        for choice in choices:
            set_ptr.append(set_ptr[-1] + len(choice.rank_sets))
        for _, ranks in sets:
            set_ranks.append(set_ranks[-1] + len(ranks))
        self.loads, self.mems, self.picks = zeros(world), zeros(world), zeros(len(items) + 1)
        self.items, self.choices, self.sets, self.starts = items, choices, sets, starts
        self.stamps = zeros(3)
        self._args = [
            buffer(self.sizes),
            buffer(items or [0]),
            buffer(len(group) if g in sand else 0 for g, group, _ in self._groups),
            buffer(starts),
            buffer(c.config.degree for c in choices),
            buffer(c.price_us for c in choices),
            buffer(c.memory_mib for c in choices),
            buffer(set_ptr),
            buffer(j for j, _ in sets),
            buffer(set_ranks),
            buffer(r for _, ranks in sets for r in ranks),
            buffer(twins),
            buffer([x for swap in swaps for x in swap] or [0]),
            buffer(x for pair in ratios for x in pair),
            zeros(len(problem.groups) * (num_q + 2)),
            zeros((len(items) + 1) * num_q),
            zeros(len(items) + 1),
            zeros(len(items) + 1),
            self.loads,
            self.mems,
            self.picks,
            zeros(3 * (len(items) + 1)),
            zeros((len(items) + 1) * self.sizes[6]),
            zeros(self.sizes[6]),
            zeros(world),
            zeros(3 + 2 * world),
            zeros(4 * MEMO_STATES),
            zeros(MEMO_STATES * (3 + 2 * world)),
            self.stamps,
        ]
        self.sand_choices = [self._whole(g) for g in self.sand]
        self._sand_price = buffer([c.price_us for _, c in self.sand_choices] or [0])
        self._sand_mib = buffer([c.memory_mib for _, c in self.sand_choices] or [0])

    def _whole(self, g: int) -> tuple[int, Choice]:
        choices = self.problem.groups[g].choices
        return next((j, c) for j, c in enumerate(choices) if c.config.is_whole)

    def decide(self, limit: int, budget: int, node_limit: int, spread: bool) -> int:
        """The kernel's answer for the rocks (sand only through its conditions)."""
        status: int = decide(limit, budget, self.problem.cap_mib, node_limit, int(spread), *self._args)
        self.nodes += int(self.stamps[2])
        return status

    def attempt(self, limit: int, budget: int, node_limit: int) -> Attempt:
        """Decides, and where the rocks fit, packs the sand and repairs its packing towards `limit`.

        Rocks are spread first, which leaves every rank room for sand; then packed tightly, which finds the
        placements that need it.
        """
        spread = self._attempt(limit, budget, node_limit // 4, True)
        if spread.status == INFEASIBLE or (spread.makespan_us or limit + 1) <= limit:
            return spread
        tight = self._attempt(limit, budget, node_limit, False)
        if tight.makespan_us is None and spread.makespan_us is not None:
            return spread if tight.status != INFEASIBLE else Attempt(INFEASIBLE)
        if spread.makespan_us is not None and spread.makespan_us < (tight.makespan_us or limit):
            return spread
        return tight

    def _attempt(self, limit: int, budget: int, node_limit: int, spread: bool) -> Attempt:
        status = self.decide(limit, budget, node_limit, spread)
        if status != FEASIBLE:
            return Attempt(status)
        cells: dict[tuple[int, int, tuple[int, ...]], int] = {}
        for i, g in enumerate(self.items):
            j, ranks = self.sets[int(self.picks[i])]
            key = g, self._groups[g][2][j - self.starts[g]], ranks
            cells[key] = cells.get(key, 0) + 1
        took = self._pack_sand(limit)
        if took is None:
            return Attempt(UNKNOWN)
        world = self.problem.world_size
        for number, (g, (j, _)) in enumerate(zip(self.sand, self.sand_choices, strict=True)):
            for r in range(world):
                if count := int(took[number * world + r]):
                    cells[g, j, (r,)] = count
        makespan = max(int(load) for load in self.loads)
        return Attempt(FEASIBLE, makespan, tuple(Cell(*key, count) for key, count in sorted(cells.items())))

    def _pack_sand(self, limit: int) -> Any | None:
        """Members of each sand group per rank, by Eq. (8) with `limit` for F; memory first where that fails."""
        world, groups = self.problem.world_size, len(self.sand)
        start_loads, start_mems = list(self.loads), list(self.mems)
        by_price = sorted(range(groups), key=lambda n: -self.sand_choices[n][1].price_us)
        by_memory = sorted(range(groups), key=lambda n: -self.sand_choices[n][1].memory_mib)
        for order, blind in ((by_price, False), (by_memory, True)):
            for r in range(world):
                self.loads[r], self.mems[r] = start_loads[r], start_mems[r]
            took = zeros(max(1, groups) * world)
            if all(self._pack_one(n, limit, blind, took) for n in order):
                relieve(
                    limit, self.problem.cap_mib, groups, world, self._sand_price, self._sand_mib,
                    self.loads, self.mems, took,
                )  # fmt: skip
                return took
        return None

    def _pack_one(self, number: int, limit: int, blind: bool, took: Any) -> bool:
        """One sand group; `blind` to time balances memory alone."""
        world, (_, choice) = self.problem.world_size, self.sand_choices[number]
        row, price = zeros(world), 0 if blind else choice.price_us
        count = len(self.problem.groups[self.sand[number]])
        done: bool = pack_group(
            count, price, choice.memory_mib, limit, self.problem.cap_mib, world, self.loads, self.mems, row
        )
        for r in range(world):
            took[number * world + r] = row[r]
            if blind:
                self.loads[r] += row[r] * choice.price_us
        return done


def _thrift(choice: Choice) -> tuple[int, int, int]:
    return choice.area_us, choice.config.degree, choice.memory_mib


def _conditions(sand: Sequence[tuple[int, Choice]]) -> list[tuple[int, int]]:
    """Weights (a, b) of the necessary conditions: time alone, memory alone, and between them the time-to-memory
    ratio of each sand group and of all sand, where a rank full of light sequences runs out of memory first.

    Args:
        sand: (count, whole choice) of each sand group.
    """
    time_us = sum(count * choice.price_us for count, choice in sand)
    memory_mib = sum(count * choice.memory_mib for count, choice in sand)
    pairs = [(choice.price_us, choice.memory_mib) for _, choice in sand[:4]] + [(time_us, memory_mib)]
    mixed = [(1024, max(1, 1024 * time // memory)) for time, memory in pairs if memory > 0]
    return list(dict.fromkeys([(1, 0), (0, 1), *mixed]))


@dataclass(frozen=True)
class SearchResult:
    """What a search found and proved.

    Args:
        cells: the best placement; empty where none was found.
        makespan_us: its largest load.
        bound_us: no placement has a smaller largest load.
        num_splits, split_bound: splits of the placement, and their proven minimum among placements within
            epsilon of the bound (0 where nothing was proven).
        proven_infeasible: no placement exists at all.
        nodes: search nodes of all decisions.
    """

    cells: tuple[Cell, ...]
    makespan_us: int
    bound_us: int
    num_splits: int
    split_bound: int
    proven_infeasible: bool
    nodes: int


@dataclass
class ExactSearch:
    """Bisects the target of one problem.

    Args:
        epsilon: slack of the split search, relative; also how near to the bound a makespan with sand must come.
        node_limit: nodes of one decision; beyond it the decision is unknown and the gap stays open.
        max_rocks: rocks at most, unless more groups cannot be whole.
    """

    problem: PlacementProblem
    epsilon: float = 1e-3
    node_limit: int = 20_000
    max_rocks: int = 256

    def solve(self) -> SearchResult:
        """Never raises for a hard problem; the result says what is proven."""
        sand, best, bound, nodes = self._first_sand(), None, 0, 0
        while True:
            decider = Decider(self.problem, sand)
            bound, best, infeasible = self._bisect(decider, bound, best)
            nodes += decider.nodes
            if infeasible:
                return SearchResult((), 0, 0, 0, 0, True, nodes)
            tight = best is not None and best[0] <= bound + int(bound * self.epsilon / 4)
            if tight or not sand or not self._may_refine(sand):
                break
            sand = sand[1:]
        if best is None:
            return SearchResult((), 0, bound, 0, 0, False, nodes)
        decider.nodes = 0
        best, split_bound = self._fewest_splits(decider, bound, best)
        return SearchResult(
            best[1], best[0], bound, self._splits(best[1]), split_bound, False, nodes + decider.nodes
        )

    def _splits(self, cells: Sequence[Cell]) -> int:
        return sum(c.count for c in cells if len(c.ranks) > 1)

    def _first_sand(self) -> tuple[int, ...]:
        """Groups that are light (below 0.5 % of the mean load each) and fit whole, and those beyond the most
        rocks; dearest first."""
        groups = self.problem.groups
        mean = sum(len(g) * min(c.area_us for c in g.choices) for g in groups) / self.problem.world_size
        sand, rocks = [], 0
        order = sorted(range(len(groups)), key=lambda g: (-min(c.area_us for c in groups[g].choices), g))
        for g in order:
            whole = groups[g].whole
            light = whole is not None and 200 * whole.price_us < mean and len(groups[g]) > 1
            if whole is not None and (light or sand or rocks + len(groups[g]) > self.max_rocks):
                sand.append(g)
            else:
                rocks += len(groups[g])
        return tuple(sand)

    def _may_refine(self, sand: tuple[int, ...]) -> bool:
        groups = self.problem.groups
        rocks = sum(len(g) for n, g in enumerate(groups) if n not in sand)
        return rocks + len(groups[sand[0]]) <= self.max_rocks

    def _root_bound(self, decider: Decider, bound: int, horizon: int) -> int | None:
        """Least T whose necessary conditions hold before any rock is placed; None if none does."""
        if decider.decide(horizon, NO_BUDGET, 0, False) == INFEASIBLE:
            return None
        low, high = bound - 1, horizon
        while high - low > 1:
            middle = (low + high) // 2
            if decider.decide(middle, NO_BUDGET, 0, False) == INFEASIBLE:
                low = middle
            else:
                high = middle
        return high

    def _bisect(
        self, decider: Decider, bound: int, best: tuple[int, tuple[Cell, ...]] | None
    ) -> tuple[int, tuple[int, tuple[Cell, ...]] | None, bool]:
        """Raises the bound and lowers the best makespan until they meet (within epsilon / 4 where there is sand).

        The target starts at the bound and moves up in growing steps, so that proofs stay near the optimum, where
        they are informative, and far below it, where they are cheap.
        """
        groups = self.problem.groups
        horizon = sum(len(g) * max(c.price_us for c in g.choices) for g in groups)
        root = self._root_bound(decider, max(bound, 1), horizon)
        if root is None:
            return bound, None, True
        bound = max(bound, root)
        low, step = bound, max(1, bound // 2048)  # targets below `low` are settled: proven, or too hard
        tolerance = int(bound * self.epsilon / 4) if decider.sand else 0
        target = bound
        while best is None or best[0] > max(bound, low) + tolerance:
            answer = decider.attempt(target, NO_BUDGET, self.node_limit)
            if answer.makespan_us is not None and (best is None or answer.makespan_us < best[0]):
                best = answer.makespan_us, answer.cells
            if answer.status == INFEASIBLE:
                bound = max(bound, target + 1)
            if answer.makespan_us is None or answer.makespan_us > target:
                if target >= horizon:
                    return bound, best, answer.status == INFEASIBLE
                low = target + 1
            if best is None:
                target, step = min(low + step, horizon), 2 * step
            else:
                target = (low + best[0] - 1) // 2
        return bound, best, False

    def _fewest_splits(
        self, decider: Decider, bound: int, best: tuple[int, tuple[Cell, ...]]
    ) -> tuple[tuple[int, tuple[Cell, ...]], int]:
        """Fewest splits within epsilon of the bound (of the best makespan where that is further away)."""
        limit = max(best[0], bound + int(bound * self.epsilon))
        proven, all_proven = 0, True
        for budget in range(self._splits(best[1])):
            answer = decider.attempt(limit, budget, self.node_limit)
            if answer.makespan_us is not None and answer.makespan_us <= limit:
                return (answer.makespan_us, answer.cells), proven
            all_proven = all_proven and answer.status == INFEASIBLE
            proven = budget + 1 if all_proven else proven
        return best, proven
