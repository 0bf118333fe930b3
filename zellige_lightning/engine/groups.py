"""Process groups by rank set: made once, by all ranks in one order, and never destroyed during a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from zellige_lightning.errors import ConfigError, EngineError

TRANSPORTS = ("auto", "groups", "parent")
RankSet = tuple[int, ...]


class ProcessGroupCache:
    """One process group per rank set of the legal family, and the parent group of all ranks for the others.

    `new_group` is called by all ranks in one sorted order, since it is a collective of the world, and
    always with a timeout, since sub-groups do not inherit one. No group of one rank is made: it would cost
    a communicator.

    Args:
        timeout: of every collective of these groups.
        device: where the warm-up tensor lives; a communicator takes its memory at first use.
        transport: `groups`: each rank set has a group of its own. `parent`: none but the group of all ranks.
            `auto`: a group of their own as far as `max_communicators` goes, largest sets first; the others
            use the parent.
        max_communicators: bound on the groups that one rank is a member of, the parent among them.
    """

    def __init__(
        self,
        timeout: timedelta,
        device: torch.device | None = None,
        transport: str = "groups",
        max_communicators: int | None = None,
    ) -> None:
        self._timeout, self._device = timeout, device or torch.device("cpu")
        self.transport, self._bound = transport, max_communicators
        self._groups: dict[RankSet, dist.ProcessGroup] = {}
        self._parent: dist.ProcessGroup | None = None
        self._without: set[RankSet] = set()

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def rank_sets(self) -> frozenset[RankSet]:
        """Those that have a group."""
        return frozenset(self._groups)

    @property
    def communicators(self) -> int:
        """Groups of the rank that is a member of most."""
        return max(Counter(rank for ranks in self._groups for rank in ranks).values(), default=0)

    def __str__(self) -> str:
        text = f"{len(self)} process groups, at most {self.communicators} on one rank"
        without = f", {len(self._without)} rank sets over the group of all ranks"
        return text + (without if self._without else "")

    def prepare(self, rank_sets: Iterable[RankSet]) -> None:
        """Make the missing groups. A collective: all ranks of the world call it with the same sets.

        Raises:
            EngineError: a rank set that is not ascending, free of doubles and inside the world. On all ranks.
            ConfigError: more groups than `max_communicators` allows, where each set needs its own.
        """
        world = dist.get_world_size()
        wanted = {ranks for ranks in map(tuple, rank_sets) if len(ranks) > 1} - set(self._groups)
        for ranks in sorted(wanted):
            _check(ranks, world)
        if self.transport != "groups" and world > 1:
            self._parent = self._make(tuple(range(world)))
        for ranks in sorted(wanted, key=lambda r: (-len(r), r)):
            if ranks in self._groups:
                continue
            if self.transport == "parent" or not self._room_for(ranks):
                self._without.add(ranks)
            else:
                self._make(ranks)

    def _room_for(self, ranks: RankSet) -> bool:
        """Whether each member may join one more group. All ranks count alike, so all decide alike."""
        if self._bound is None:
            return True
        joined = Counter(rank for known in self._groups for rank in known)
        if all(joined[rank] < self._bound for rank in ranks):
            return True
        if self.transport == "groups":
            raise ConfigError(
                f"rank set {ranks} would need more than {self._bound} process groups on one rank",
                fix="set engine.transport=auto, raise engine.max_communicators, or narrow planner.family",
            )
        return False

    def _make(self, ranks: RankSet) -> dist.ProcessGroup:
        if ranks not in self._groups:
            group = self._groups[ranks] = dist.new_group(list(ranks), timeout=self._timeout)
            if dist.get_rank() in ranks:
                # Takes the memory now; and batched point-to-point may involve a part of the members only once
                # all have met.
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        return self._groups[ranks]

    def find(self, ranks: RankSet) -> dist.ProcessGroup | None:
        """The group of that rank set; None if it goes over the parent.

        Raises:
            EngineError: a set that was not prepared, where there is no parent.
        """
        if self._parent is not None and (self.transport == "parent" or ranks not in self._groups):
            return None
        return self.get(ranks)

    @property
    def parent(self) -> dist.ProcessGroup:
        """The group of all ranks, over which a rank set without a group of its own exchanges."""
        assert self._parent is not None, "no group of all ranks was made"
        return self._parent

    def get(self, ranks: RankSet) -> dist.ProcessGroup:
        """The group of that rank set.

        Raises:
            EngineError: a set that was not prepared.
        """
        try:
            return self._groups[ranks]
        except KeyError:
            raise EngineError(
                f"no process group for rank set {ranks}",
                fix="plan within the legal family, or widen it with planner.family",
            ) from None

    def close(self) -> None:
        """Destroy the groups. Only at the end of a run: gloo frees nothing before the last reference goes."""
        for group in self._groups.values():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._groups.clear()
        self._parent = None


def _check(ranks: RankSet, world: int) -> None:
    if list(ranks) != sorted(set(ranks)) or ranks[0] < 0 or ranks[-1] >= world:
        raise EngineError(
            f"rank set {ranks} in a world of {world} ranks",
            fix="a rank set ascends, names no rank twice, and has ranks of this world only",
        )
