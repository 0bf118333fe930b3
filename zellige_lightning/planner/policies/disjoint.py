"""`disjoint`: the optimum over every layout of disjoint rank groups and every configuration per group
(paper, Sec. III-B).

No system computes it in training. It is the best that any disjoint-group placement could do, so its
distance to `exact` isolates the restriction itself.
"""

from __future__ import annotations

from dataclasses import replace

from zellige_lightning.planner.policies.knapformer import all_layouts
from zellige_lightning.planner.policies.ledger import Ledger, no_option
from zellige_lightning.planner.policies.menu import PolicyProblem, policy_problem
from zellige_lightning.planner.policies.slots import SlotSolution, best_disjoint, undominated
from zellige_lightning.planner.problem import PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution


def solve_disjoint(problem: PlacementProblem, brief: Brief) -> Solution:
    """The better of the CP-SAT optimum and KnapFormer's best layout (which may have a group across nodes
    that CP-SAT's model does not). `statuses` says whether the first is proven within
    `planner.deterministic_limit`.

    Raises:
        PlanningError: no layout fits.
    """
    known = policy_problem(problem)
    found = _search(known, brief)
    rivals = [ledger for _, ledger in all_layouts(known)]
    candidates: list[Ledger] = ([found.ledger] if found else []) + rivals
    if not candidates:
        raise no_option(known, 0, "layout of disjoint groups", brief)
    best = min(candidates, key=lambda ledger: ledger.makespan_us)
    return replace(best.solution(brief), statuses=(found.status if found else "OPEN",))


def _search(problem: PolicyProblem, brief: Brief) -> SlotSolution | None:
    """All degrees where their rank sets are legal; powers of two otherwise, which any family has."""
    configs = undominated(problem, problem.configs)
    found = best_disjoint(problem, configs, brief)
    if found is None:
        powers = [c for c in configs if c.degree & (c.degree - 1) == 0]
        found = best_disjoint(problem, powers, brief)
    return found
