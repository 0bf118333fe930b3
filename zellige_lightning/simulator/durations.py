"""How long one rank's pieces of work take on a modeled cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from zellige_lightning.placement.topology import Topology
from zellige_lightning.simulator.cluster import Cluster
from zellige_lightning.simulator.constants import Transformer
from zellige_lightning.simulator.traffic import FORWARD, Exchange

BACKWARD_FLOPS = 2.5  # flash attention recomputes the scores
LINEAR_BACKWARD = 2.0  # gradients of inputs and of weights


@dataclass(frozen=True)
class StepModel:
    """Durations of a rank's work on a cluster."""

    cluster: Cluster
    model: Transformer
    topology: Topology

    def attention_s(self, rows: float, keys: float, heads_share: float, which: str) -> float:
        """One kernel over `rows` queries and `keys` keys, for a share of the heads."""
        if not rows or not keys:
            return 0.0
        half = self.cluster.half_efficiency_tokens
        flops = 4 * rows * keys * self.model.width * heads_share
        share = rows / (rows + half) * keys / (keys + half)
        if which == FORWARD:
            efficiency = self.cluster.attention_forward_efficiency
        else:
            flops, efficiency = BACKWARD_FLOPS * flops, self.cluster.attention_backward_efficiency
        return flops / (1e12 * self.cluster.peak_tflops * efficiency * share)

    def linear_s(self, num_tokens: int, which: str) -> float:
        """Everything of a layer outside self-attention."""
        flops = num_tokens * self.model.linear_flops_per_token * (1 if which == FORWARD else LINEAR_BACKWARD)
        return flops / (1e12 * self.cluster.peak_tflops * self.cluster.linear_efficiency)

    @cached_property
    def _rates(self) -> dict[str, float]:
        return {link: self.cluster.bytes_per_s(link) for link in ("pair", "node", "1+1")}

    def transfer_s(
        self, ranks: tuple[int, ...], exchange: Exchange, position: int
    ) -> tuple[float, tuple[int, ...]]:
        """Wire time of one position, and the ranks that it talks to. Links work at the same time; in and
        out too."""
        sent = exchange.sent[position]
        received = {p: row[position] for p, row in enumerate(exchange.sent) if position in row}
        links: dict[str, list[int]] = {}
        for direction, sizes in enumerate((sent, received)):
            for peer, size in sizes.items():
                own, other = ranks[position], ranks[peer]
                link = self.topology.class_of((min(own, other), max(own, other)))
                links.setdefault(link, [0, 0])[direction] += size
        latency = self.cluster.hop_us if exchange.kind.startswith("ring") else self.cluster.collective_us
        wire = max((max(sizes) / self._rates[link] for link, sizes in links.items()), default=0.0)
        return latency * 1e-6 + wire, tuple(sorted(ranks[p] for p in sent.keys() | received.keys()))
