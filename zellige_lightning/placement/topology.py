"""Nodes of ranks, and the class of a rank set: sets of one class cost the same."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zellige_lightning.errors import ConfigError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Topology:
    """`node_of[r]` is the node of rank r."""

    node_of: tuple[int, ...]

    @classmethod
    def uniform(cls, world_size: int, ranks_per_node: int | None = None) -> Topology:
        """Consecutive ranks fill nodes of `ranks_per_node` (default: one node)."""
        if world_size < 1:
            raise ConfigError(f"a world of {world_size} ranks")
        if ranks_per_node is not None and ranks_per_node < 1:
            raise ConfigError(f"nodes of {ranks_per_node} ranks", fix="planner.ranks_per_node is at least 1")
        per_node = ranks_per_node or world_size
        return cls(tuple(rank // per_node for rank in range(world_size)))

    @property
    def world_size(self) -> int:
        return len(self.node_of)

    @property
    def num_nodes(self) -> int:
        return len(set(self.node_of))

    def class_of(self, ranks: tuple[int, ...]) -> str:
        """`node` where all ranks share a node, else the ranks per node, largest first, such as `4+4`."""
        counts = sorted(Counter(self.node_of[r] for r in ranks).values(), reverse=True)
        return "node" if len(counts) == 1 else "+".join(map(str, counts))


@dataclass(frozen=True)
class RankSite:
    """Where one rank runs, as it sees it itself; gathered from all ranks to find the topology.

    Args:
        machine: names the machine; empty where it cannot tell.
        local_world_size: ranks that its launcher started on this node, 0 where it does not say.
    """

    machine: str = ""
    local_world_size: int = 0

    def to_text(self) -> str:
        return f"{self.local_world_size}|{self.machine}"

    @classmethod
    def from_text(cls, text: str) -> RankSite:
        """Raises: ConfigError where the text is not from `to_text`."""
        size, bar, machine = text.partition("|")
        if not bar or not size.isdecimal():
            raise ConfigError(f"{text!r} does not say where a rank runs")
        return cls(machine, int(size))


def rank_site(environment: Mapping[str, str] = os.environ, boot_id: Path | None = _BOOT_ID) -> RankSite:
    """The site of this process. Machines are told apart by the boot of their kernel, which containers of one
    machine share and machines with cloned host names do not; by host name where that cannot be read."""
    try:
        machine = boot_id.read_text().strip() if boot_id is not None else ""
    except OSError:
        machine = ""
    size = environment.get("LOCAL_WORLD_SIZE", "")
    return RankSite(machine or socket.gethostname(), int(size) if size.isdecimal() else 0)


def detect_topology(sites: Sequence[RankSite], ranks_per_node: int | None = None) -> Topology:
    """Ranks of one machine are a node. Nodes are numbered by their first rank.

    Args:
        sites: of every rank, by rank.
        ranks_per_node: overrides what the ranks see: consecutive ranks fill nodes of that many.

    Where some rank cannot name its machine, the launcher's local world sizes count (it numbers the ranks of a
    node one after another); where these do not add up either, all ranks are one node.

    Raises:
        ConfigError: no ranks, or `ranks_per_node` below 1.
    """
    if ranks_per_node is not None or not sites:
        return Topology.uniform(len(sites), ranks_per_node)
    machines = [site.machine for site in sites]
    if all(machines):
        first = {machine: rank for rank, machine in reversed(list(enumerate(machines)))}
        numbers = {rank: node for node, rank in enumerate(sorted(first.values()))}
        return Topology(tuple(numbers[first[machine]] for machine in machines))
    return _by_local_sizes([site.local_world_size for site in sites])


def _by_local_sizes(sizes: Sequence[int]) -> Topology:
    node_of: list[int] = []
    while len(node_of) < len(sizes):
        size, start = sizes[len(node_of)], len(node_of)
        if size < 1 or set(sizes[start : start + size]) != {size} or start + size > len(sizes):
            return Topology.uniform(len(sizes))
        node_of += [node_of[-1] + 1 if node_of else 0] * size
    return Topology(tuple(node_of))
