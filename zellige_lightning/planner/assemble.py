"""From placed sequences to the `Plan` that the ranks share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zellige_lightning.placement.plan import PlacementOption, Plan, rank_sums
from zellige_lightning.placement.sequence import GlobalBatch
from zellige_lightning.planner.bounds import lower_bound
from zellige_lightning.planner.cut import CatalogCut
from zellige_lightning.planner.menu import OptionMenu
from zellige_lightning.planner.problem import Choice, PlacementProblem

Placed = dict[int, tuple[Choice, PlacementOption]]


def assemble(
    batch: GlobalBatch, problem: PlacementProblem, menu: OptionMenu, placed: Placed, **known: Any
) -> Plan:
    """The `Plan` of a placement: Eq. (6) sums, fixed cost, anchors by Eq. (4), and the bound that holds
    for any planner where `known` brings no better one."""
    order = [placed[i] for i in range(len(batch.sequences))]
    options = tuple(option for _, option in order)
    cut = CatalogCut.of_table(menu.table)
    side = {b: cut.is_anchor(menu.table, b) for b in {s.bucket for s in batch.sequences}}
    world = problem.world_size
    bound_us, source = lower_bound(problem)
    plan = Plan(
        step=batch.step,
        world_size=world,
        options=options,
        loads_us=rank_sums(options, (choice.price_us for choice, _ in order), world),
        memory_mib=rank_sums(options, (choice.memory_mib for choice, _ in order), world),
        fixed_us=menu.table.fixed_us,
        anchors=tuple(s.index for s in batch.sequences if side[s.bucket]),
        lower_bound_us=bound_us,
        bound_source=source,
    )
    return replace(plan, **known)
