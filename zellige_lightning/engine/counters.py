"""What an engine did, in numbers that a dry run of the schedule (`dry_run.py`) must give as well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from zellige_lightning.placement import Topology
from zellige_lightning.placement.schedule import PASSES

KINDS = ("ulysses", "all_gather", "ring", "ring_gradient", "reduce_scatter")
LINKS = ("node", "network")  # between ranks of one node, or of two


def link_between(rank: int, peer: int, topology: Topology | None) -> str:
    """The class of the link between two ranks; without a topology all ranks share a node."""
    if topology is None or topology.node_of[rank] == topology.node_of[peer]:
        return "node"
    return "network"


@dataclass
class Counters:
    """Of one rank since the last reset.

    Args:
        bytes_sent: to other ranks, by kind of exchange.
        exchanges: collectives that the rank took part in, by kind.
        kernel_calls: attention kernels, by pass.
        link_bytes: `bytes_sent`, by class of link.
        resident_kv_bytes: the largest keys and values that one kernel call of a split sequence worked on
            (paper, Table II, last column).
    """

    bytes_sent: Counter[str] = field(default_factory=Counter)
    exchanges: Counter[str] = field(default_factory=Counter)
    kernel_calls: Counter[str] = field(default_factory=Counter)
    link_bytes: Counter[str] = field(default_factory=Counter)
    resident_kv_bytes: int = 0

    def reset(self) -> None:
        for counter in (self.bytes_sent, self.exchanges, self.kernel_calls, self.link_bytes):
            counter.clear()
        self.resident_kv_bytes = 0

    def sent(self, kind: str, by_link: Iterable[tuple[str, int]]) -> None:
        """One exchange with what goes over each link, bytes."""
        self.exchanges[kind] += 1
        for link, size in by_link:
            self.bytes_sent[kind] += size
            self.link_bytes[link] += size

    def resident(self, kv_bytes: int) -> None:
        self.resident_kv_bytes = max(self.resident_kv_bytes, kv_bytes)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_sent.values())

    def to_integers(self) -> list[int]:
        """A fixed number of integers, so that ranks can gather them."""
        return [
            *(self.bytes_sent[kind] for kind in KINDS),
            *(self.exchanges[kind] for kind in KINDS),
            *(self.kernel_calls[which] for which in PASSES),
            *(self.link_bytes[link] for link in LINKS),
            self.resident_kv_bytes,
        ]

    @classmethod
    def of_integers(cls, integers: Sequence[int]) -> Counters:
        """The inverse of `to_integers`."""
        values = iter(integers)

        def take(names: Sequence[str]) -> Counter[str]:
            return Counter({name: next(values) for name in names})

        return cls(take(KINDS), take(KINDS), take(PASSES), take(LINKS), next(values))
