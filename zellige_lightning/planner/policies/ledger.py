"""The running account of a policy: loads and memory per rank, and the counts that become its placement."""

from __future__ import annotations

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import WHOLE, ParallelConfig
from zellige_lightning.planner.policies.menu import PolicyProblem
from zellige_lightning.planner.problem import Choice, RankSet
from zellige_lightning.planner.solution import Account, Brief, Solution


class Ledger:
    """The account of a policy for one problem, by configurations."""

    def __init__(self, problem: PolicyProblem) -> None:
        self.problem, self._account = problem, Account(problem)
        self.loads_us, self.memory_mib = self._account.loads_us, self._account.memory_mib

    def choice(self, group: int, config: ParallelConfig, ranks: RankSet) -> Choice | None:
        return self.problem.choice(group, config, ranks)

    def add(self, group: int, config: ParallelConfig, ranks: RankSet, count: int = 1) -> None:
        """`count` members of `group` take that option, which exists."""
        index = self.problem.find(group, config, ranks)
        assert index is not None, f"group {group} has no option {config} on {ranks}"
        self._account.add((group, index, ranks), count)

    def rows(self) -> list[tuple[int, ParallelConfig, RankSet, int]]:
        """(group, configuration, ranks, count) of everything placed."""
        rows = sorted(self._account.counts.items())
        return [(key[0], self._account.choice(key).config, key[2], count) for key, count in rows]

    @property
    def makespan_us(self) -> int:
        return self._account.makespan_us

    @property
    def fits(self) -> bool:
        return self._account.fits

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
        return Solution(self._account.cells)


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
