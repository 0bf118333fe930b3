"""From counts to the `Plan` that the ranks share."""

from __future__ import annotations

from collections.abc import Sequence

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import PlacementOption, Plan
from zellige_lightning.placement.sequence import GlobalBatch
from zellige_lightning.planner.bounds import lower_bound
from zellige_lightning.planner.problem import PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution, sums


def assemble(
    batch: GlobalBatch, problem: PlacementProblem, brief: Brief, solution: Solution, fixed_us: int = 0
) -> Plan:
    """The `Plan` of a solution: one option per sequence, Eq. (6) sums, anchors by Eq. (4), and the better
    of the solution's bound and the one that holds for any planner."""
    loads, memory = sums(problem, solution.cells)
    general_us, general = lower_bound(problem)
    better = solution.bound_us >= general_us and solution.bound_source != "none"
    return Plan(
        step=batch.step,
        world_size=problem.world_size,
        options=tuple(expand(problem, solution, len(batch.sequences))),
        loads_us=tuple(loads),
        memory_mib=tuple(memory),
        fixed_us=fixed_us,
        lower_bound_us=solution.bound_us if better else general_us,
        bound_source=solution.bound_source if better else general,
        anchors=tuple(sorted(m for g in brief.anchors for m in problem.groups[g].members)),
        planner=brief.config.name,
        statuses=solution.statuses,
        split_bound=solution.split_bound,
        nodes=solution.nodes,
    )


def expand(problem: PlacementProblem, solution: Solution, count: int) -> Sequence[PlacementOption]:
    """Option of each sequence: members of a group in ascending order take its cells in ascending order.

    Raises:
        PlanningError: counts that do not cover every sequence exactly once (a planner's mistake).
    """
    options: list[PlacementOption | None] = [None] * count
    taken = [0] * len(problem.groups)
    for cell in sorted(solution.cells):
        group = problem.groups[cell.group]
        option = PlacementOption(group.choices[cell.choice].config, cell.ranks)
        first = taken[cell.group]
        taken[cell.group] = first + cell.count
        for member in group.members[first : first + cell.count]:
            options[member] = option
    complete = [option for option in options if option is not None]
    if len(complete) != count or taken != [len(g) for g in problem.groups]:
        raise PlanningError("the planner placed a sequence twice or not at all", fix="report this as a bug")
    return complete
