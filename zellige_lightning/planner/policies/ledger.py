"""The running account of a policy: loads and memory per rank, and the counts that become its placement."""

from __future__ import annotations

from collections import Counter

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import WHOLE, ParallelConfig
from zellige_lightning.planner.policies.menu import PolicyProblem
from zellige_lightning.planner.problem import Cell, Choice, RankSet
from zellige_lightning.planner.solution import Brief, Solution


class Ledger:
    """Counts of Eq. (5) with their sums of Eq. (6), for one problem."""

    def __init__(self, problem: PolicyProblem) -> None:
        self.problem = problem
        self.loads_us = [0] * problem.world_size
        self.memory_mib = [0] * problem.world_size
        self._counts: Counter[tuple[int, int, RankSet]] = Counter()

    def choice(self, group: int, config: ParallelConfig, ranks: RankSet) -> Choice | None:
        return self.problem.choice(group, config, ranks)

    def add(self, group: int, config: ParallelConfig, ranks: RankSet, count: int = 1) -> None:
        """`count` members of `group` take that option, which exists."""
        index = self.problem.find(group, config, ranks)
        assert index is not None, f"group {group} has no option {config} on {ranks}"
        choice = self.problem.groups[group].choices[index]
        self._counts[group, index, ranks] += count
        for rank in ranks:
            self.loads_us[rank] += count * choice.price_us
            self.memory_mib[rank] += count * choice.memory_mib

    def rows(self) -> list[tuple[int, ParallelConfig, RankSet, int]]:
        """(group, configuration, ranks, count) of everything placed."""
        groups = self.problem.groups
        return [
            (g, groups[g].choices[j].config, ranks, n) for (g, j, ranks), n in sorted(self._counts.items())
        ]

    @property
    def makespan_us(self) -> int:
        return max(self.loads_us)

    @property
    def fits(self) -> bool:
        return max(self.memory_mib) <= self.problem.cap_mib

    def fits_on(self, choice: Choice, ranks: RankSet) -> bool:
        """Whether one more such sequence stays under the cap."""
        return all(self.memory_mib[r] + choice.memory_mib <= self.problem.cap_mib for r in ranks)

    def solution(self, brief: Brief) -> Solution:
        """Raises: PlanningError where a rank would run out of memory, which the rival did not prevent."""
        if not self.fits:
            rank = max(range(len(self.memory_mib)), key=self.memory_mib.__getitem__)
            raise PlanningError(
                f"{brief.config.name} puts {self.memory_mib[rank]} MiB on rank {rank}, above the cap of "
                f"{self.problem.cap_mib} MiB: it would run out of memory",
                fix="raise planner.memory_cap_gib, lower the tokens per batch, or choose planner=exact",
                step=brief.step,
            )
        return Solution(tuple(sorted(Cell(*key, count) for key, count in self._counts.items())))


def require_whole(problem: PolicyProblem, group: int, brief: Brief) -> Choice:
    """The whole-sequence choice of a group. Raises: PlanningError where a member does not fit on one rank."""
    choice = problem.choice(group, WHOLE, (0,))
    if choice is None:
        which = problem.groups[group]
        raise PlanningError(
            f"{brief.config.name} keeps sequences whole, and sequence {which.members[0]} (bucket "
            f"{which.bucket!r}, {which.num_tokens} tokens) does not fit on one rank under the cap of "
            f"{problem.cap_mib} MiB: it would run out of memory",
            fix="raise planner.memory_cap_gib, or choose a policy that splits sequences",
            step=brief.step,
        )
    return choice


def no_option(problem: PolicyProblem, group: int, wanted: str, brief: Brief) -> PlanningError:
    """For a rule that names an option which the group does not have."""
    which = problem.groups[group]
    return PlanningError(
        f"{brief.config.name} has no {wanted} for bucket {which.bucket!r} ({which.num_tokens} tokens) "
        f"that is priced, has a process group and fits under the cap of {problem.cap_mib} MiB",
        fix="set planner.family=contiguous, profile more configurations, or raise planner.memory_cap_gib",
        step=brief.step,
    )
