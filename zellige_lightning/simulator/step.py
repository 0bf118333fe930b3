"""A training step on a modeled cluster, from a placement: the engine's block order, layer by layer.

One step with full activation checkpointing is, per layer, a forward, a recomputed forward and a backward. A
few layers are simulated and the rest is extrapolated from the last one, since all layers are alike.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from zellige_lightning.placement.plan import Filling, PlacementOption, Plan
from zellige_lightning.placement.schedule import END, shard
from zellige_lightning.placement.topology import Topology
from zellige_lightning.simulator.cluster import Cluster
from zellige_lightning.simulator.constants import Transformer
from zellige_lightning.simulator.durations import StepModel
from zellige_lightning.simulator.events import Compute, Operation, RankClock, Start, Wait, run
from zellige_lightning.simulator.traffic import (
    BACKWARD,
    FORWARD,
    BlockTraffic,
    Exchange,
    SplitRun,
    block_traffic,
    split_runs,
)

SIMULATED_LAYERS = 3


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
class _RunProgram:
    """Operations of every position of a run of equal split blocks in one pass, first exchange to last.

    The blocks of a run are simulated as one that takes `run.count` times as long.
    """

    step: StepModel
    run: SplitRun
    traffic: BlockTraffic
    which: str

    def _exchange(self, exchange: Exchange, number: str, position: int) -> tuple[Start, Wait]:
        seconds, peers = self.step.transfer_s(self.run.ranks, exchange, position)
        key = self.run.first, self.which, number
        return Start(key, seconds * self.run.count, peers), Wait(key)

    def of(self, position: int) -> list[list[Operation]]:
        """The operations of a position, divided where the engine pauses."""
        stages: list[list[Operation]] = [[]]
        for operation in self._operations(position):
            if operation is None:
                stages.append([])
            else:
                stages[-1].append(operation)
        return stages

    def _operations(self, position: int) -> Iterator[Operation | None]:
        num_sequences = len(self.run.lengths) * self.run.count
        yield Compute(self.step.cluster.split_launch_us * 1e-6 * num_sequences)
        for i, exchange in enumerate(self.traffic.before(self.which)):
            start, wait = self._exchange(exchange, f"before{i}", position)
            yield from (start, None, wait)
        yield from self._attention(position)
        for i, exchange in enumerate(self.traffic.after(self.which)):
            start, wait = self._exchange(exchange, f"after{i}", position)
            yield from (start, None, wait)

    def _attention(self, position: int) -> Iterator[Operation | None]:
        k = self.run.config.k
        arriving: Wait | None = None
        for hop in range(k):
            following: Wait | None = None
            if hop + 1 < k:
                start, following = self._exchange(self._rings[hop], f"ring{hop}", position)
                yield start
            yield Compute(self._kernel(position, hop) * self.run.count)
            if self.which == BACKWARD and k > 1:
                if arriving is not None:
                    yield from (None, arriving)
                start, arriving = self._exchange(self._gradients[hop], f"gradient{hop}", position)
                yield start
            if following is not None:
                if self.which == FORWARD or hop == 0:
                    yield None
                yield following
        if arriving is not None:
            yield from (None, arriving)

    @cached_property
    def _rings(self) -> list[Exchange]:
        return [self.traffic.ring(hop) for hop in range(self.run.config.k - 1)]

    @cached_property
    def _gradients(self) -> list[Exchange]:
        return [self.traffic.ring_gradient(hop) for hop in range(self.run.config.k)]

    def _kernel(self, position: int, hop: int) -> float:
        share = 1 / self.run.config.h
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
        layers: how many are simulated. One is enough for a single sequence, whose ranks keep in step.
    """

    def __init__(
        self, cluster: Cluster, model: Transformer, topology: Topology, layers: int = SIMULATED_LAYERS
    ) -> None:
        self.step, self.layers = StepModel(cluster, model, topology), layers

    def plan(self, plan: Plan, lengths: Sequence[int]) -> StepTimes:
        """The step of a plan, `lengths` by sequence index."""
        return self.placement(plan.options, lengths, plan.filling)

    def placement(
        self, options: Sequence[PlacementOption], lengths: Sequence[int], filling: Sequence[Filling] = ()
    ) -> StepTimes:
        """The step of a placement, `options` and `lengths` by sequence index, `filling` by rank."""
        held, runs = _held(options, lengths, self.step.topology.world_size), split_runs(options, lengths)
        for of_rank, pieces in zip(held, filling, strict=False):
            of_rank.filling = pieces
        layers = {which: self._layer(held, runs, which) for which in (FORWARD, BACKWARD)}
        depth = self.step.model.layers
        simulated = min(depth, self.layers)
        last, before = self._sweep(layers, simulated), self._sweep(layers, simulated - 1)
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

    def _layer(self, held: list[_Held], runs: list[SplitRun], which: str) -> list[list[Operation]]:
        """Operations of each rank in one layer and pass, whole sequences in their pauses."""
        stages: list[list[list[Operation]]] = [[[]] for _ in held]  # of each rank: what is between pauses
        pauses: list[list[int]] = [
            [] for _ in held
        ]  # of its single blocks -> of the runs that stand for them
        for split_run in runs:
            traffic = block_traffic(split_run.config, split_run.lengths, self.step.model.attention)
            program = _RunProgram(self.step, split_run, traffic, which)
            for position, rank in enumerate(split_run.ranks):
                before, *behind = program.of(position)
                first = len(stages[rank]) - 1
                pauses[rank] += [*range(first, first + len(behind))] * split_run.count
                stages[rank][-1] += before  # a block begins without a pause
                stages[rank] += behind
        return [self._rank_layer(*of_rank, which) for of_rank in zip(held, stages, pauses, strict=True)]

    def _rank_layer(
        self, held: _Held, stages: list[list[Operation]], pauses: list[int], which: str
    ) -> list[Operation]:
        linear = Compute(self.step.linear_s(held.num_tokens, which))
        pieces: dict[int, float] = defaultdict(float)
        for pause, lengths in held.pieces(which):
            at = pauses[pause] if 0 <= pause < len(pauses) else len(stages)
            pieces[at] += self._whole_s(lengths, which)
        attention = list(stages[0])
        for number, stage in enumerate(stages[1:]):
            attention += [Compute(pieces.pop(number, 0.0)), *stage]
        attention += [Compute(seconds) for seconds in pieces.values()]
        return [linear, *attention] if which == BACKWARD else [*attention, linear]

    def _whole_s(self, lengths: Sequence[int], which: str) -> float:
        counts = Counter(lengths)
        return sum(n * self.step.attention_s(size, size, 1.0, which) for size, n in counts.items())


@dataclass
class _Held:
    """Tokens of one rank, the lengths of its whole sequences in buffer order, and where they run."""

    num_tokens: int = 0
    whole: list[int] = field(default_factory=list)
    filling: Filling | None = None

    def pieces(self, which: str) -> Iterator[tuple[int, list[int]]]:
        """(pause, lengths of the whole sequences in it)."""
        planned = ((0, len(self.whole)),) if self.filling is None else getattr(self.filling, which)
        first = 0
        for pause, count in (*planned, (END, len(self.whole))):
            yield pause, self.whole[first : first + count]
            first += count


def _held(options: Sequence[PlacementOption], lengths: Sequence[int], world_size: int) -> list[_Held]:
    held = [_Held() for _ in range(world_size)]
    for option, length in zip(options, lengths, strict=True):
        for position, rank in enumerate(option.ranks):
            held[rank].num_tokens += len(shard(length, position, option.config.degree))
        if option.config.is_whole:
            held[option.ranks[0]].whole.append(length)
    return held


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
