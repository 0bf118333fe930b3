"""The exact search: certified makespan, then certified fewest splits, over rocks and sand together.

A placement is searched for a target T; T is bisected from the best lower bound. See `search_kernel` for the
decision and `sand_kernel` for the packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zellige_lightning.planner.decider import NO_BUDGET, Decider, light_groups
from zellige_lightning.planner.problem import Cell, PlacementProblem
from zellige_lightning.planner.search_kernel import INFEASIBLE


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
        epsilon: slack of the split search, relative; also how near to the bound a makespan with sand must
            come.
        node_limit: nodes of one decision; beyond it the decision is unknown and the gap stays open.
        max_rocks: rocks at most, unless more groups cannot be whole.
    """

    problem: PlacementProblem
    epsilon: float = 1e-3
    node_limit: int = 20_000
    max_rocks: int = 256

    def solve(self) -> SearchResult:
        """Never raises for a hard problem; the result says what is proven."""
        sand, best, bound, nodes = light_groups(self.problem, self.max_rocks), None, 0, 0
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

    def _may_refine(self, sand: tuple[int, ...]) -> bool:
        groups = self.problem.groups
        rocks = sum(len(g) for n, g in enumerate(groups) if n not in sand)
        return rocks + len(groups[sand[0]]) <= self.max_rocks

    def _root_bound(self, decider: Decider, bound: int, horizon: int) -> int | None:
        """Least T whose necessary conditions hold before any rock is placed; None if none does."""
        if decider.decide(horizon, NO_BUDGET, 0) == INFEASIBLE:
            return None
        low, high = bound - 1, horizon
        while high - low > 1:
            middle = (low + high) // 2
            if decider.decide(middle, NO_BUDGET, 0) == INFEASIBLE:
                low = middle
            else:
                high = middle
        return high

    def _bisect(
        self, decider: Decider, bound: int, best: tuple[int, tuple[Cell, ...]] | None
    ) -> tuple[int, tuple[int, tuple[Cell, ...]] | None, bool]:
        """Raises the bound and lowers the best makespan until they meet (within epsilon / 4 where there is
        sand).

        The target starts at the bound and moves up in growing steps, so that proofs stay near the optimum,
        where they are informative, and far below it, where they are cheap.
        """
        groups = self.problem.groups
        horizon = sum(len(g) * max(c.price_us for c in g.choices) for g in groups)
        root = self._root_bound(decider, max(bound, 1), horizon)
        if root is None:
            return bound, None, True
        bound = max(bound, root)
        low, step = bound, max(1, bound // 2048)  # targets below `low` are settled: proven, or too hard
        tolerance = int(bound * self.epsilon / 4) if decider.light else 0
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
