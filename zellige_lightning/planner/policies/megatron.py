"""Megatron-like hybrid context parallelism: dynamic power-of-two groups (Megatron-LM's
`BalancedCPScheduler`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.policies.ledger import Ledger, no_option
from zellige_lightning.planner.policies.menu import PolicyProblem, policy_problem
from zellige_lightning.planner.problem import PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution

SLACK = 1.05  # a group takes sequences until it has 5 % more work than the first of its sub-step


def solve_megatron(problem: PlacementProblem, brief: Brief) -> Solution:
    """Degree 2^ceil(log2(L / longest)); sub-steps of aligned ring groups of about equal work L^2 / degree;
    in the last one the smallest groups double until all ranks work.

    `longest`, its flag `--max-seqlen-per-dp-cp-rank`, is a user's guess: here the best of the powers of two
    below the longest sequence. Its barriers between sub-steps are not in a plan's loads, which is in its
    favour.

    Raises:
        PlanningError: no choice of `longest` fits.
    """
    known = policy_problem(problem)
    longest = max((group.num_tokens for group in known.groups), default=1)
    limits = {max(1, -(-longest // 2**i)) for i in range(known.world_size.bit_length())}
    found = [ledger for limit in sorted(limits, reverse=True) if (ledger := _place(known, limit)) is not None]
    if not found:
        raise no_option(known, 0, "placement in power-of-two ring groups", brief)
    return min(found, key=lambda ledger: ledger.makespan_us).solution(brief)


@dataclass
class _Team:
    """A group of a sub-step: members are groups of the problem, one entry per sequence."""

    degree: int
    work: float = 0.0
    members: list[int] = field(default_factory=list)


def _place(problem: PolicyProblem, limit: int) -> Ledger | None:
    ledger = Ledger(problem)
    for teams in sub_steps(problem, limit):
        first = 0
        for team in sorted(teams, key=lambda t: -t.degree):  # falling powers of two stay aligned
            ranks = tuple(range(first, first + team.degree))
            first += team.degree
            config = ParallelConfig(1, 1, team.degree)
            for g in team.members:
                if problem.find(g, config, ranks) is None:
                    return None
                ledger.add(g, config, ranks)
    return ledger if ledger.fits else None


def sub_steps(problem: PolicyProblem, limit: int) -> list[list[_Team]]:
    """Groups of each sub-step, with the sequences that they run."""
    most = 1 << (problem.world_size.bit_length() - 1)
    waiting: dict[int, list[int]] = {}
    for g in sorted(range(len(problem.groups)), key=lambda g: (-problem.groups[g].num_tokens, g)):
        degree = min(most, _power_of_two(problem.groups[g].num_tokens / limit))
        waiting.setdefault(degree, []).extend([g] * len(problem.groups[g]))
    steps = []
    while any(waiting.values()):
        steps.append(_sub_step(problem, waiting))
    if steps:
        _double(steps[-1], problem.world_size)
    return steps


def _power_of_two(ratio: float) -> int:
    degree = 1
    while degree < ratio:
        degree *= 2
    return degree


def _sub_step(problem: PolicyProblem, waiting: dict[int, list[int]]) -> list[_Team]:
    free, teams, target = problem.world_size, list[_Team](), 0.0

    def work(g: int, degree: int) -> float:
        return problem.groups[g].num_tokens ** 2 / degree

    while True:
        ready = [d for d, queue in waiting.items() if queue and d <= free]
        if not ready:
            return teams
        degree = max(ready, key=lambda d: (work(waiting[d][0], d), d))
        team, queue = _Team(degree), waiting[degree]
        target = target or work(queue[0], degree)
        while queue and (not team.members or team.work + work(queue[0], degree) <= SLACK * target):
            team.work += work(queue[0], degree)
            team.members.append(queue.pop(0))
        free -= degree
        teams.append(team)


def _double(teams: list[_Team], world_size: int) -> None:
    """The smallest group takes twice the ranks, again and again, while there are ranks left."""
    free = world_size - sum(team.degree for team in teams)
    while teams:
        smallest = min(teams, key=lambda t: t.degree)
        if smallest.degree > free:
            return
        free -= smallest.degree
        smallest.degree *= 2
