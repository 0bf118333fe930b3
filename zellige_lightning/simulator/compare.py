"""All policies on one batch of a modeled cluster: predicted and simulated step, bytes, memory, bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import Plan
from zellige_lightning.placement.sequence import GlobalBatch
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.cost import MemoryModel, ProfileTable
from zellige_lightning.planner.planner import BatchPlanner, PlannerConfig, make_planner
from zellige_lightning.planner.policies import POLICIES
from zellige_lightning.simulator.cluster import Cluster
from zellige_lightning.simulator.constants import Transformer
from zellige_lightning.simulator.step import StepSimulator, StepTimes
from zellige_lightning.simulator.traffic import AttentionBytes, attention_bytes

OURS = "exact"
ALL_POLICIES = (OURS, "paper", *POLICIES)
MAIN_POLICIES = (OURS, "paper", "naive", "adaptive_load", "usp", "knapformer")
_ANY_POSITION = ("knapformer", "disjoint")  # their groups stand on any consecutive ranks
_NO_CAP_MIB = 1 << 40
LAYOUT_SEARCHES = ("disjoint", "flexsp")  # their CP-SAT looks for the best groups as well
LAYOUT_LIMIT, CP_SAT_LIMIT = 4.0, 10.0  # CP-SAT's deterministic time, of those and of the others


@dataclass(frozen=True)
class PolicyRow:
    """What one policy does with a batch.

    Args:
        plan: its plan; None where it has none, for the reason in `error`.
        uncapped: its plan without the memory cap, where it has none under it.
        times: simulated step of the plan; None where that was not asked for, or of neither plan.
        sent: attention bytes of the plan.
    """

    policy: str
    plan: Plan | None
    error: str = ""
    uncapped: Plan | None = None
    times: StepTimes | None = None
    sent: AttentionBytes | None = None

    @property
    def any_plan(self) -> Plan | None:
        return self.plan or self.uncapped

    @property
    def out_of_memory(self) -> bool:
        return self.plan is None and self.uncapped is not None

    @property
    def largest_memory_mib(self) -> int | None:
        plan = self.any_plan
        return None if plan is None else max(plan.memory_mib)

    @property
    def additive_error(self) -> float | None:
        """How far the largest sum of prices is above (or below) the simulated makespan, relative to it."""
        plan = self.any_plan
        if plan is None or self.times is None or not self.times.makespan:
            return None
        return plan.makespan_us * 1e-6 / self.times.makespan - 1.0


@dataclass(frozen=True)
class Stage:
    """A modeled cluster, a model, a world and its prices.

    Args:
        table: modeled, or measured by the profiler.
        cap_mib: M_cap.
    """

    cluster: Cluster
    model: Transformer
    topology: Topology
    table: ProfileTable
    cap_mib: int
    _planners: dict[tuple[PlannerConfig, int], BatchPlanner] = field(default_factory=dict, repr=False)

    def planner(self, config: PlannerConfig, cap_mib: int | None = None) -> BatchPlanner:
        cap = cap_mib or self.cap_mib
        if (config, cap) not in self._planners:
            memory = MemoryModel(self.model.geometry)
            planner = make_planner(config, self.table, memory, self.topology, self.model.heads, cap)
            planner.prepare()  # in training imports and compilation are over before the first batch
            self._planners[config, cap] = planner
        return self._planners[config, cap]

    def config(self, policy: str, layout: str = "auto") -> PlannerConfig:
        """Settings under which a policy is compared. No process groups are made, so that their number is
        not bounded."""
        return PlannerConfig(
            name=policy,
            family="contiguous" if policy in _ANY_POSITION else "aligned",
            deterministic_limit=LAYOUT_LIMIT if policy in LAYOUT_SEARCHES else CP_SAT_LIMIT,
            max_groups_per_rank=1 << 30,
            layout=layout,
        )

    def row(
        self,
        policy: str,
        batch: GlobalBatch,
        layout: str = "auto",
        simulate: bool = True,
        lift_cap: bool = True,
    ) -> PolicyRow:
        """One policy on one batch.

        Args:
            lift_cap: where it runs out of memory, plan again without a cap, in its favour.
        """
        config = self.config(policy, layout)
        plan, uncapped, error = None, None, ""
        try:
            plan = self.planner(config).plan(batch)
        except PlanningError as failed:
            error = failed.message
            uncapped = self._uncapped(config, batch) if lift_cap else None
        return self.measured(PolicyRow(policy, plan, error, uncapped), batch, simulate)

    def _uncapped(self, config: PlannerConfig, batch: GlobalBatch) -> Plan | None:
        try:
            return self.planner(config, _NO_CAP_MIB).plan(batch)
        except PlanningError:
            return None

    def measured(self, row: PolicyRow, batch: GlobalBatch, simulate: bool = True) -> PolicyRow:
        """The row with simulated times and bytes."""
        plan = row.any_plan
        if plan is None:
            return row
        lengths = [s.num_tokens for s in batch.sequences]
        times = (
            StepSimulator(self.cluster, self.model, self.topology).plan(plan, lengths) if simulate else None
        )
        sent = attention_bytes(plan.options, lengths, self.topology, self.model.attention, self.model.layers)
        return PolicyRow(row.policy, row.plan, row.error, row.uncapped, times, sent)

    def rows(
        self, batch: GlobalBatch, policies: Iterable[str] = ALL_POLICIES, simulate: bool = True
    ) -> list[PolicyRow]:
        return [self.row(policy, batch, simulate=simulate) for policy in policies]


def ratio(rival: PolicyRow, ours: PolicyRow) -> float | None:
    """Modeled step of a rival over ours, by prices, the fixed step cost included; None where one has no
    plan at all."""
    if rival.any_plan is None or ours.plan is None:
        return None
    return rival.any_plan.predicted_us / ours.plan.predicted_us


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Least, mean, largest."""
    return min(values), sum(values) / len(values), max(values)
