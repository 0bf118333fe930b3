"""Which whole sequences of a plan run between the exchanges of its split ones, from the table of prices."""

from __future__ import annotations

from zellige_lightning.placement.filling import fill_gaps
from zellige_lightning.placement.plan import Filling, Plan
from zellige_lightning.placement.schedule import split_blocks
from zellige_lightning.placement.sequence import GlobalBatch
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.cost import ProfileTable

_MOST_STAGES = 50_000  # of all members of all split sequences: replaying more would take longer than planning


def filling_of(
    plan: Plan, batch: GlobalBatch, table: ProfileTable, topology: Topology
) -> tuple[Filling, ...]:
    """The filling of every rank; empty where no rank holds whole sequences beside split ones, or where there
    are so many split ones that they hide each other's exchanges."""
    split = [option for option in plan.options if len(option.ranks) > 1]
    members = {rank for option in split for rank in option.ranks}
    beside = any(len(o.ranks) == 1 and o.ranks[0] in members for o in plan.options)
    if not beside or sum(o.config.degree * o.config.k for o in split) > _MOST_STAGES:
        return ()
    attention = _attention_us(batch, table)
    overhead = [
        table.overhead_us(sequence.bucket, option, topology) if len(option.ranks) > 1 else 0.0
        for sequence, option in zip(batch.sequences, plan.options, strict=True)
    ]
    for option, block in split_blocks(plan.options) if table.start_us else ():
        overhead[block[0]] += table.block_start_us(option, topology) / table.overhead_scale
    return fill_gaps(plan.options, attention, overhead, plan.world_size)


def _attention_us(batch: GlobalBatch, table: ProfileTable) -> list[float]:
    """Of each sequence. They mostly share the bucket's object, which is cheaper to hash than its shape."""
    found = {id(sequence.bucket): sequence.bucket for sequence in batch.sequences}
    known = {key: table.attention_us(bucket) for key, bucket in found.items()}
    return [known[id(sequence.bucket)] for sequence in batch.sequences]
