"""USP: one static Ulysses-by-ring configuration for every sequence (paper, Sec. II-C; arXiv 2405.07719)."""

from __future__ import annotations

import re

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.policies.groups import RankGroup, consecutive, dearest_first, longest_first
from zellige_lightning.planner.policies.ledger import Ledger, no_option
from zellige_lightning.planner.policies.menu import PolicyProblem, policy_problem
from zellige_lightning.planner.problem import PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution


def solve_usp(problem: PlacementProblem, brief: Brief) -> Solution:
    """Every sequence in P = u r equal shards: Ulysses over u neighbours, a ring over r. With P < N the N /
    P groups share the sequences, dearest first.

    `planner.layout` names the factorization, such as `u4r2`; `auto` takes the best one over all ranks, P = N.

    Raises:
        ConfigError: a factorization that the world or the heads do not allow.
        PlanningError: no factorization fits.
    """
    known = policy_problem(problem)
    found = [
        ledger for config in _factorizations(known, brief.config.layout) if (ledger := _place(known, config))
    ]
    if found:
        return min(found, key=lambda ledger: ledger.makespan_us).solution(brief)
    missing = next((g for g in range(len(known.groups)) if not _has_any(known, g, brief)), 0)
    raise no_option(known, missing, f"factorization ({brief.config.layout})", brief)


def _place(problem: PolicyProblem, config: ParallelConfig) -> Ledger | None:
    number = problem.world_size // config.degree
    groups = consecutive([config.degree] * number, lambda _: config)
    return longest_first(problem, groups, dearest_first(problem))


def _has_any(problem: PolicyProblem, group: int, brief: Brief) -> bool:
    configs = _factorizations(problem, brief.config.layout)
    sets = (RankGroup(tuple(range(c.degree)), c) for c in configs)
    return any(problem.find(group, x.config, x.ranks) is not None for x in sets)


def _factorizations(problem: PolicyProblem, layout: str) -> list[ParallelConfig]:
    world, heads = problem.world_size, problem.num_heads
    if layout == "auto":
        return [
            ParallelConfig(1, u, world // u) for u in range(1, world + 1) if world % u == 0 and heads % u == 0
        ]
    match = re.fullmatch(r"u([1-9]\d*)r([1-9]\d*)", layout)
    if match is None:
        raise ConfigError(
            f"planner.layout = {layout!r} is no USP factorization",
            fix="write `auto`, or such as u4r2: Ulysses 4, ring 2",
        )
    u, r = int(match[1]), int(match[2])
    if heads % u:
        raise ConfigError(
            f"planner.layout = {layout!r}: a Ulysses degree of {u} does not divide {heads} heads",
            fix=f"legal are {[d for d in range(1, heads + 1) if heads % d == 0]}",
        )
    if world % (u * r):
        raise ConfigError(
            f"planner.layout = {layout!r}: {u * r} ranks per sequence do not divide {world} ranks",
            fix="choose u and r whose product divides the world",
        )
    return [ParallelConfig(1, u, r)]
