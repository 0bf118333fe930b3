"""FlexSP-like: disjoint power-of-two Ulysses groups by integer programming (Hetu-Galvatron, branch
`flexsp`)."""

from __future__ import annotations

from dataclasses import replace

from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.policies.ledger import no_option
from zellige_lightning.planner.policies.menu import PolicyProblem, policy_problem
from zellige_lightning.planner.policies.slots import best_disjoint
from zellige_lightning.planner.problem import PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution


def solve_flexsp(problem: PlacementProblem, brief: Brief) -> Solution:
    """Groups of 2, 4, 8, ... ranks that cover all ranks, each with at least one sequence; the slowest one
    is minimal. With fewer sequences than that takes, ranks idle.

    As in its solver, no group has one rank (a world of one rank, or of an odd number, has no such cover).
    Its bucketing by length, which rounds up, is not needed: the batch's own buckets are few.

    Raises:
        PlanningError: no such cover, or none that fits.
    """
    known = policy_problem(problem)
    configs = _powers(known)
    enough = known.num_sequences * max((c.degree for c in configs), default=1) >= known.world_size
    found = best_disjoint(known, configs, brief, every_slot_works=enough)
    if found is None:
        raise no_option(known, 0, "cover of all ranks by power-of-two Ulysses groups", brief)
    return replace(found.ledger.solution(brief), statuses=(found.status,))


def _powers(problem: PolicyProblem) -> list[ParallelConfig]:
    degrees = [2**i for i in range(1, problem.world_size.bit_length())]
    return [ParallelConfig(1, d, 1) for d in degrees if problem.num_heads % d == 0]
