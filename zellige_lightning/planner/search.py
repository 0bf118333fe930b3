"""The exact search: certified makespan, then certified fewest splits, over rocks and sand together.

A placement is searched for a target T; T is bisected from the best lower bound. See `search_kernel` for the
decision and `sand_kernel` for the packing.
"""

from __future__ import annotations

from dataclasses import dataclass

from zellige_lightning.planner.decider import NO_BUDGET, Attempt, Decider, light_groups
from zellige_lightning.planner.problem import Cell, PlacementProblem
from zellige_lightning.planner.search_kernel import INFEASIBLE
from zellige_lightning.planner.solution import num_splits

POLISH_NODES = 2_000
LEAST_NODES = 400  # of a decision while there is no placement at all
FIRST_ROCKS = 20  # rocks to begin with, unless more sequences cannot be whole
MOST_ROCKS = 64  # rocks up to which the dearest sand may join them while the gap is open


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


Best = tuple[int, tuple[Cell, ...]]


@dataclass
class ExactSearch:
    """Bisects the target of one problem.

    Args:
        epsilon: slack of the split search, relative; also how near to the bound a makespan with sand must
            come.
        node_limit: nodes of one decision; beyond it the decision is unknown and the gap stays open.
        node_budget: nodes of all decisions about the makespan together, and again of those about splits.
    """

    problem: PlacementProblem
    epsilon: float = 1e-3
    node_limit: int = 10_000
    node_budget: int = 40_000
    bound_us: int = 0
    best: Best | None = None
    nodes: int = 0

    def solve(self) -> SearchResult:
        """Never raises for a hard problem; the result says what is proven."""
        sand = light_groups(self.problem, FIRST_ROCKS)
        while True:
            decider = Decider(self.problem, sand)
            if self._bisect(decider):
                return SearchResult((), 0, 0, 0, 0, True, self.nodes)
            if self._is_near(2) or self.nodes >= self.node_budget or not self._may_refine(sand):
                break
            sand = sand[1:]
        if self.best is None:
            return SearchResult((), 0, self.bound_us, 0, 0, False, self.nodes)
        used, self.nodes = self.nodes, 0
        split_bound = self._fewest_splits(decider)
        self._polish(decider)
        makespan, cells = self.best
        return SearchResult(
            cells, makespan, self.bound_us, num_splits(cells), split_bound, False, used + self.nodes
        )

    def _slack(self, part: int) -> int:
        return int(self.bound_us * self.epsilon / part)

    def _is_near(self, part: int) -> bool:
        """Within epsilon / part of the bound."""
        return self.best is not None and self.best[0] <= self.bound_us + self._slack(part)

    def _may_refine(self, sand: tuple[int, ...]) -> bool:
        """Whether the dearest sand is few enough to be placed one by one."""
        groups = self.problem.groups
        rocks = sum(len(g) for n, g in enumerate(groups) if n not in sand)
        return bool(sand) and rocks + len(groups[sand[0]]) <= MOST_ROCKS

    def _attempt(self, decider: Decider, target: int, budget: int, limit: int) -> Attempt:
        """One decision. Without a split budget, a better placement and a proof are remembered."""
        decider.nodes = 0
        answer = decider.attempt(target, budget, limit)
        self.nodes += decider.nodes
        if budget == NO_BUDGET:
            if answer.makespan_us is not None and (self.best is None or answer.makespan_us < self.best[0]):
                self.best = answer.makespan_us, answer.cells
            if answer.status == INFEASIBLE:
                self.bound_us = max(self.bound_us, target + 1)
        return answer

    def _root_bound(self, decider: Decider, horizon: int) -> int | None:
        """Least T whose necessary conditions hold before any rock is placed; None if none does."""
        if decider.decide(horizon, NO_BUDGET, 0) == INFEASIBLE:
            return None
        low, high = max(self.bound_us, 1) - 1, horizon
        while high - low > 1:
            middle = (low + high) // 2
            if decider.decide(middle, NO_BUDGET, 0) == INFEASIBLE:
                low = middle
            else:
                high = middle
        return high

    def _bisect(self, decider: Decider) -> bool:
        """Raises the bound and lowers the best makespan until they meet (within epsilon / 4 where there is
        sand). True where it is proven that no placement exists.

        The target starts at the bound and moves up in growing steps, so that proofs stay near the optimum,
        where they are informative, and far below it, where they are cheap.
        """
        groups = self.problem.groups
        horizon = sum(len(g) * max(c.price_us for c in g.choices) for g in groups)
        root = self._root_bound(decider, horizon)
        if root is None:
            return True
        self.bound_us = max(self.bound_us, root)
        tolerance = self._slack(4) if decider.light else 0
        limit, step = self.node_limit // 16, max(1, self.bound_us // 2048)
        target = self.bound_us
        while self.best is None:  # upwards in growing steps, hard targets left early
            answer = self._attempt(decider, target, NO_BUDGET, max(limit, LEAST_NODES))
            if answer.status == INFEASIBLE and target >= horizon:
                return True
            if answer.makespan_us is None and target >= horizon:
                return False
            target, step = min(target + step, horizon), 2 * step
        while self.best[0] > self.bound_us + tolerance and self.nodes < self.node_budget:
            limit = min(4 * limit, self.node_limit)
            self._close(decider, tolerance, limit)
            if limit == self.node_limit:
                break
        return False

    def _close(self, decider: Decider, tolerance: int, limit: int) -> None:
        """One bisection between the bound and the best makespan; too hard targets are passed over."""
        assert self.best is not None
        low = self.bound_us
        while self.best[0] > max(self.bound_us, low) + tolerance and self.nodes < self.node_budget:
            target = (low + self.best[0] - 1) // 2
            answer = self._attempt(decider, target, NO_BUDGET, limit)
            if answer.makespan_us is None or answer.makespan_us > target:
                low = target + 1

    def _fewest_splits(self, decider: Decider) -> int:
        """Fewest splits within epsilon of the bound (of the best makespan where that is further away).
        Returns the proven least number."""
        assert self.best is not None
        limit = max(self.best[0], self.bound_us + self._slack(1))
        proven, all_proven = 0, True
        for budget in range(num_splits(self.best[1])):
            answer = self._attempt(decider, limit, budget, self.node_limit)
            if answer.makespan_us is not None and answer.makespan_us <= limit:
                self.best = answer.makespan_us, answer.cells
                return proven
            all_proven = all_proven and answer.status == INFEASIBLE
            proven = budget + 1 if all_proven else proven
            if self.nodes >= self.node_budget:
                break
        return proven

    def _polish(self, decider: Decider) -> None:
        """A smaller makespan with as many splits as the best placement, which may have used all its slack."""
        assert self.best is not None
        budget = num_splits(self.best[1])
        for part in (8, 4, 2):
            target = self.bound_us + self._slack(part)
            if self.best[0] <= target or self.nodes >= self.node_budget:
                return
            answer = self._attempt(decider, target, budget, POLISH_NODES)
            if answer.makespan_us is not None and answer.makespan_us < self.best[0]:
                self.best = answer.makespan_us, answer.cells
