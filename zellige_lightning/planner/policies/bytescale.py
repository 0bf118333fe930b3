"""ByteScale-like: a sequence is split only where memory forces it, by a ring (arXiv 2502.21231; no public
code found)."""

from __future__ import annotations

from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.policies.groups import dearest_first
from zellige_lightning.planner.policies.ledger import Ledger, no_option
from zellige_lightning.planner.policies.menu import PolicyProblem, policy_problem
from zellige_lightning.planner.problem import Choice, PlacementProblem, RankSet
from zellige_lightning.planner.solution import Brief, Solution


def solve_bytescale(problem: PlacementProblem, brief: Brief) -> Solution:
    """Dearest first: the smallest ring degree under which the sequence fits somewhere, on the rank set
    whose busiest rank is least loaded. Rank sets may overlap, as its meshes do from one micro-batch to the
    next.

    Raises:
        PlanningError: a sequence finds no room.
    """
    known = policy_problem(problem)
    ledger = Ledger(known)
    for g in dearest_first(known):
        options = _by_degree(known, g)
        for _ in known.groups[g].members:
            best = _first_fit(ledger, options)
            if best is None:
                raise no_option(known, g, "ring option with room left", brief)
            ledger.add(g, *best)
    return ledger.solution(brief)


def _by_degree(problem: PolicyProblem, group: int) -> list[Choice]:
    rings = [c for c in problem.groups[group].choices if c.config == ParallelConfig(1, 1, c.config.k)]
    return sorted(rings, key=lambda c: (c.config.degree, c.price_us))


def _first_fit(ledger: Ledger, choices: list[Choice]) -> tuple[ParallelConfig, RankSet] | None:
    """Of the first degree that fits: the set that is free earliest (ties: cheaper class, lowest ranks)."""
    for degree in dict.fromkeys(c.config.degree for c in choices):
        fitting = [
            (max(ledger.loads_us[r] for r in ranks) + c.price_us, ranks, c.config)
            for c in choices
            if c.config.degree == degree
            for ranks in c.rank_sets
            if ledger.fits_on(c, ranks)
        ]
        if fitting:
            _, ranks, config = min(fitting)
            return config, ranks
    return None
