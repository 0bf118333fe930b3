"""Which whole sequences of a plan run between the exchanges of its split ones, from the table of prices."""

from __future__ import annotations

from zellige_lightning.placement.filling import fill_gaps
from zellige_lightning.placement.plan import Filling, PlacementOption, Plan
from zellige_lightning.placement.schedule import split_blocks
from zellige_lightning.placement.sequence import Bucket, GlobalBatch
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
    costs = _Costs(table, topology)
    attention = [costs.attention_us(sequence.bucket) for sequence in batch.sequences]
    overhead = [
        costs.overhead_us(sequence.bucket, option) if len(option.ranks) > 1 else 0.0
        for sequence, option in zip(batch.sequences, plan.options, strict=True)
    ]
    for option, block in split_blocks(plan.options) if table.start_us else ():
        overhead[block[0]] += table.block_start_us(option, topology)
    return fill_gaps(plan.options, attention, overhead, plan.world_size)


class _Costs:
    """Parts of the prices, each looked up once."""

    def __init__(self, table: ProfileTable, topology: Topology) -> None:
        self._table, self._topology = table, topology
        self._attention: dict[int, float] = {}

    def attention_us(self, bucket: Bucket) -> float:
        key = id(bucket)  # sequences mostly share the object, and it is cheaper to hash than its shape
        if key not in self._attention:
            self._attention[key] = self._table.attention_us(bucket)
        return self._attention[key]

    def overhead_us(self, bucket: Bucket, option: PlacementOption) -> float:
        """What a rank pays for sharing the sequence, beyond its part of the whole price."""
        price = self._table.price_us(bucket, option.config, self._topology.class_of(option.ranks)) or 0
        return max(0.0, price - self._table.whole_us(bucket) / option.config.degree)
