"""A training step on a modeled cluster, from a placement: the engine's block order, layer by layer.

One step with full activation checkpointing is, per layer, a forward, a recomputed forward and a backward. A
few layers are simulated and the rest is extrapolated from the last one, since all layers are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from zellige_lightning.placement.plan import PlacementOption, Plan
from zellige_lightning.placement.schedule import Block, build_schedule
from zellige_lightning.placement.topology import Topology
from zellige_lightning.simulator.cluster import Cluster
from zellige_lightning.simulator.constants import Transformer
from zellige_lightning.simulator.events import Compute, Operation, RankClock, Start, Wait, run
from zellige_lightning.simulator.traffic import BACKWARD, FORWARD, BlockTraffic, Exchange, block_traffic

SIMULATED_LAYERS = 3
BACKWARD_FLOPS = 2.5  # flash attention recomputes the scores
LINEAR_BACKWARD = 2.0  # gradients of inputs and of weights


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, per rank, without the placement-independent cost.

    Args:
        computing: kernels and launches.
        exposed: on the wire with nothing to do.
        waiting: for other ranks, the end of the step included.
    """

    computing: tuple[float, ...]
    exposed: tuple[float, ...]
    waiting: tuple[float, ...]

    @property
    def makespan(self) -> float:
        return max(
            (c + e + w for c, e, w in zip(self.computing, self.exposed, self.waiting, strict=True)),
            default=0.0,
        )

    @property
    def imbalance(self) -> float:
        """Largest over mean time that ranks are busy (computing or on the wire)."""
        busy = [c + e for c, e in zip(self.computing, self.exposed, strict=True)]
        return max(busy) / (sum(busy) / len(busy)) if sum(busy) else 1.0


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


@dataclass(frozen=True)
class _BlockProgram:
    """Operations of every position of one split block in one pass, first exchange to last."""

    step: StepModel
    block: Block
    traffic: BlockTraffic
    name: int
    which: str

    def _exchange(self, exchange: Exchange, number: str, position: int) -> tuple[Start, Wait]:
        seconds, peers = self.step.transfer_s(self.block.ranks, exchange, position)
        key = self.name, self.which, number
        return Start(key, seconds, peers), Wait(key)

    def of(self, position: int) -> Iterator[Operation]:
        launch = self.step.cluster.split_launch_us * 1e-6 * len(self.block.segments)
        yield Compute(launch)
        for i, exchange in enumerate(self.traffic.before(self.which)):
            yield from self._exchange(exchange, f"before{i}", position)
        yield from self._attention(position)
        for i, exchange in enumerate(self.traffic.after(self.which)):
            yield from self._exchange(exchange, f"after{i}", position)

    def _attention(self, position: int) -> Iterator[Operation]:
        k = self.block.config.k
        arriving: Wait | None = None
        for hop in range(k):
            following: Wait | None = None
            if hop + 1 < k:
                start, following = self._exchange(self._rings[hop], f"ring{hop}", position)
                yield start
            yield Compute(self._kernel(position, hop))
            if self.which == BACKWARD and k > 1:
                if arriving is not None:
                    yield arriving
                start, arriving = self._exchange(self._gradients[hop], f"gradient{hop}", position)
                yield start
            if following is not None:
                yield following
        if arriving is not None:
            yield arriving

    @cached_property
    def _rings(self) -> list[Exchange]:
        return [self.traffic.ring(hop) for hop in range(self.block.config.k - 1)]

    @cached_property
    def _gradients(self) -> list[Exchange]:
        return [self.traffic.ring_gradient(hop) for hop in range(self.block.config.k)]

    def _kernel(self, position: int, hop: int) -> float:
        share = 1 / self.block.config.h
        iq, ik, _ = self.traffic.positions[position]
        if len(self.traffic.lengths) > 1:
            return sum(
                count * self.step.attention_s(n, n, share, self.which)
                for n, count in Counter(self.traffic.lengths).items()
            )
        keys = self.traffic.key_rows(self.traffic.ring_block(ik, hop))
        return self.step.attention_s(self.traffic.query_rows(iq, ik), keys, share, self.which)


class StepSimulator:
    """Simulates steps of a model on a cluster.

    Args:
        topology: of the world that is simulated.
    """

    def __init__(self, cluster: Cluster, model: Transformer, topology: Topology) -> None:
        self.step = StepModel(cluster, model, topology)

    def plan(self, plan: Plan, lengths: Sequence[int]) -> StepTimes:
        """The step of a plan, `lengths` by sequence index."""
        return self.placement(plan.options, lengths)

    def placement(self, options: Sequence[PlacementOption], lengths: Sequence[int]) -> StepTimes:
        world = self.step.topology.world_size
        schedules = [build_schedule(options, lengths, rank, world) for rank in range(world)]
        blocks = [schedule.blocks for schedule in schedules]
        tokens = [schedule.num_tokens for schedule in schedules]
        layers = {w: self._layer(blocks, tokens, w) for w in (FORWARD, BACKWARD)}
        depth = self.step.model.layers
        simulated = min(depth, SIMULATED_LAYERS)
        last = self._sweep(layers, simulated)
        before = self._sweep(layers, simulated - 1) if depth > simulated else last
        return _finished([_extrapolated(a, b, depth - simulated) for a, b in zip(before, last, strict=True)])

    def _sweep(self, layers: Mapping[str, list[list[Operation]]], depth: int) -> list[RankClock]:
        """`depth` forwards, then as many recomputed forwards and backwards."""
        parts = [FORWARD] * depth + [FORWARD, BACKWARD] * depth
        programs = {
            rank: [
                _named(operation, number)
                for number, part in enumerate(parts)
                for operation in layers[part][rank]
            ]
            for rank in range(self.step.topology.world_size)
        }
        return list(run(programs).values())

    def _layer(
        self, blocks: Sequence[Sequence[Block]], tokens: Sequence[int], which: str
    ) -> list[list[Operation]]:
        """Operations of each rank in one layer and pass. The whole pack runs while the first exchange is in
        flight."""
        return [
            list(self._rank_layer(rank, blocks[rank], tokens[rank], which)) for rank in range(len(blocks))
        ]

    def _rank_layer(
        self, rank: int, blocks: Sequence[Block], num_tokens: int, which: str
    ) -> Iterator[Operation]:
        pending = [Compute(self._whole_s(block, which)) for block in blocks if block.config.is_whole]
        linear = Compute(self.step.linear_s(num_tokens, which))
        if which == BACKWARD:
            yield linear
        for block in blocks:
            if block.config.is_whole:
                continue
            lengths = tuple(s.num_tokens for s in block.segments)
            traffic = block_traffic(block.config, lengths, self.step.model.attention)
            name = min(s.sequence for s in block.segments)
            program = _BlockProgram(self.step, block, traffic, name, which)
            for operation in program.of(block.ranks.index(rank)):
                yield operation
                if isinstance(operation, Start) and pending:
                    yield pending.pop()
        yield from pending
        if which == FORWARD:
            yield linear

    def _whole_s(self, block: Block, which: str) -> float:
        counts = Counter(s.num_tokens for s in block.segments)
        return sum(count * self.step.attention_s(n, n, 1.0, which) for n, count in counts.items())


def _named(operation: Operation, number: int) -> Operation:
    """The operation in that part of the sweep: its exchanges are its own."""
    if isinstance(operation, Start):
        return Start((number, operation.key), operation.seconds, operation.peers)
    return Wait((number, operation.key)) if isinstance(operation, Wait) else operation


def _extrapolated(before: RankClock, last: RankClock, more: int) -> RankClock:
    """`more` layers beyond the simulated ones, each of which adds what the last one did."""
    return RankClock(
        computing=last.computing + more * (last.computing - before.computing),
        exposed=last.exposed + more * (last.exposed - before.exposed),
        waiting=last.waiting + more * (last.waiting - before.waiting),
    )


def _finished(clocks: Sequence[RankClock]) -> StepTimes:
    """All ranks end together: the early ones wait."""
    ends = [c.computing + c.exposed + c.waiting for c in clocks]
    last = max(ends, default=0.0)
    return StepTimes(
        tuple(c.computing for c in clocks),
        tuple(c.exposed for c in clocks),
        tuple(c.waiting + last - end for c, end in zip(clocks, ends, strict=True)),
    )
