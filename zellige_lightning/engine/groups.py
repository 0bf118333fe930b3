"""Process groups by rank set: made once, by all ranks in one order, and never destroyed during a run."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from zellige_lightning.errors import EngineError


class ProcessGroupCache:
    """One process group per rank set of the legal family.

    `new_group` is called by all ranks in one sorted order, since it is a collective of the world, and
    always with a timeout, since sub-groups do not inherit one. No group of one rank is made: it would cost
    a communicator.

    Args:
        timeout: of every collective of these groups.
        device: where the warm-up tensor lives; a communicator takes its memory at first use.
    """

    def __init__(self, timeout: timedelta, device: torch.device | None = None) -> None:
        self._timeout, self._device = timeout, device or torch.device("cpu")
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def rank_sets(self) -> frozenset[tuple[int, ...]]:
        return frozenset(self._groups)

    def prepare(self, rank_sets: Iterable[tuple[int, ...]]) -> None:
        """Make the missing groups. A collective: all ranks of the world call it with the same sets."""
        wanted = {ranks for ranks in rank_sets if len(ranks) > 1} - set(self._groups)
        rank = dist.get_rank()
        for ranks in sorted(wanted, key=lambda r: (-len(r), r)):
            group = dist.new_group(list(ranks), timeout=self._timeout)
            self._groups[ranks] = group
            if rank in ranks:
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)

    def get(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
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
