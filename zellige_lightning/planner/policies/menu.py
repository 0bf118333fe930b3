"""What a policy may choose from: every priced option, also those that no optimum would take, and the
catalog."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.placement.sequence import Bucket, GlobalBatch
from zellige_lightning.planner.menu import OptionMenu
from zellige_lightning.planner.policies.workload import Workload
from zellige_lightning.planner.problem import Choice, PlacementProblem, RankSet


@dataclass(frozen=True)
class PolicyProblem(PlacementProblem):
    """A problem with what rivals know besides: the fitted work of a length, the heads and the nodes.

    Args:
        workload: fitted to the whole-sequence prices of the catalog.
        num_heads: of the model; a Ulysses degree divides it.
        node_of: node of each rank.
    """

    workload: Workload = field(default_factory=Workload)
    num_heads: int = 1
    node_of: tuple[int, ...] = ()

    @cached_property
    def _index(self) -> dict[tuple[int, ParallelConfig, RankSet], int]:
        return {
            (g, choice.config, ranks): j
            for g, group in enumerate(self.groups)
            for j, choice in enumerate(group.choices)
            for ranks in choice.rank_sets
        }

    def find(self, group: int, config: ParallelConfig, ranks: RankSet) -> int | None:
        """Index of the choice that gives `group` this option; None where it is none (no price, no process
        group, or more memory than the cap)."""
        return self._index.get((group, config, ranks))

    def choice(self, group: int, config: ParallelConfig, ranks: RankSet) -> Choice | None:
        found = self.find(group, config, ranks)
        return None if found is None else self.groups[group].choices[found]

    @cached_property
    def configs(self) -> tuple[ParallelConfig, ...]:
        """Configurations that any group has, by degree."""
        found = {c.config for group in self.groups for c in group.choices}
        return tuple(sorted(found, key=lambda c: (c.degree, c)))


class PolicyMenu(OptionMenu):
    """As `OptionMenu`, without dropping what is dominated: a rival takes the options that its rules name."""

    def choices(self, bucket: Bucket) -> tuple[Choice, ...]:
        if bucket not in self._menus:
            fitting = [c for c in self._all_choices(bucket) if c.memory_mib <= self.cap_mib]
            self._menus[bucket] = tuple(fitting)
        return self._menus[bucket]

    @cached_property
    def _workload(self) -> Workload:
        points = [(b.num_tokens, self.table.whole_us(b)) for b in self.table.buckets]
        return Workload.fit(points)

    def problem(self, batch: GlobalBatch) -> PolicyProblem:
        plain = super().problem(batch)
        return PolicyProblem(
            plain.world_size,
            plain.cap_mib,
            plain.groups,
            workload=self._workload,
            num_heads=self.num_heads,
            node_of=self.topology.node_of,
        )


def policy_problem(problem: PlacementProblem) -> PolicyProblem:
    """The problem as a policy needs it.

    Raises:
        PlanningError: a problem that was not made by a `PolicyMenu`, such as one of the plain problem files.
    """
    if not isinstance(problem, PolicyProblem):
        raise PlanningError(
            "rival policies need token counts and a profiled catalog, which a plain problem does not have",
            fix="make the policy with make_planner, or solve plain problems with exact, joint or paper",
        )
    return problem
