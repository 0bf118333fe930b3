"""What every process of `benchmarks/step.py` runs: a profile, plans of all policies, and interleaved
training steps."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from ranks import CoreWatch, has_own_core, pin
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zellige_lightning.agreement import Agreement
from zellige_lightning.batch import RankBatch, materialize
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine, ProcessGroupCache
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.errors import PlanningError
from zellige_lightning.placement import Bucket, GlobalBatch, Plan, Topology
from zellige_lightning.planner import (
    MemoryModel,
    ModelGeometry,
    PlannerConfig,
    ProfileTable,
    legal_configs,
    legal_family,
    make_planner,
)
from zellige_lightning.profile_runs import Measurement
from zellige_lightning.profiler import ProfilerConfig, measure_table
from zellige_lightning.recipes.wan21.config import WanConfig
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.sources import FieldSpec, SyntheticSource
from zellige_lightning.trial import TrialStep

HEADS, WIDTH, TEXT_DIM, TEXT_TOKENS = 8, 192, 16, 8
CONFIG = WanConfig(
    dim=WIDTH,
    ffn_dim=768,
    num_heads=HEADS,
    num_layers=2,
    text_dim=TEXT_DIM,
    text_len=TEXT_TOKENS,
    freq_dim=32,
)
NO_CAP_MIB = 1 << 20


@dataclass(frozen=True)
class Job:
    """What all ranks are told.

    Args:
        batches: (bucket, count) rows of each batch.
        entries: policies in the order in which they take turns; ours may stand twice, for the noise.
        rounds: timed steps of each entry on each batch.
    """

    world_size: int
    store: str
    batches: tuple[tuple[tuple[Bucket, int], ...], ...]
    entries: tuple[str, ...]
    rounds: int


@dataclass(frozen=True)
class StepTime:
    """One step of one entry on one batch, as this rank saw it.

    Args:
        lost_share: to what else the machine did, see `CoreWatch`.
    """

    wall_s: float
    cpu_s: float
    lost_share: float
    loss: float


class QuietWan(WanModule):
    """Logs nothing: no trainer is attached."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Forward(nn.Module):
    """Lets the data-parallel wrapper see a training step as its forward."""

    def __init__(self, module: WanModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: RankBatch) -> Tensor:
        return self.module.training_step(batch, 0)


def run_rank(rank: int, job: Job) -> dict[str, Any]:
    """Times by (entry, batch) on this rank, whole-sequence prices, and on rank 0 the plans."""
    pin(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(minutes=5),
    )
    try:
        return _Ranks(rank, job).run()
    finally:
        dist.destroy_process_group()


def turn_order(num_entries: int, batch: int, repeat: int) -> list[int]:
    """Another order in each round, the same on every rank: a step's time also depends on what ran before."""
    turns = list(range(num_entries))
    random.Random(f"{batch}/{repeat}").shuffle(turns)
    return turns


class _Ranks:
    """One rank's model, engine and plans."""

    def __init__(self, rank: int, job: Job) -> None:
        self.rank, self.job, world = rank, job, job.world_size
        self.watch = CoreWatch()
        self.topology = Topology.uniform(world)
        self.configs = legal_configs(HEADS, world)
        groups = ProcessGroupCache(timedelta(minutes=5))
        groups.prepare(legal_family(self.topology, "contiguous", range(2, world + 1)))
        torch.manual_seed(0)
        self.module = QuietWan(CONFIG)
        self._randomise()
        self.engine, self.router = CoalescedAttentionEngine(groups), AttentionRouter()
        self.module.route_attention(self.router)
        source = SyntheticSource(
            {"latents": FieldSpec((64,), torch.float32)},
            {"text": FieldSpec((TEXT_TOKENS, TEXT_DIM), torch.float32)},
        )
        self.trial = TrialStep(Precision(), source)
        self.parallel = DistributedDataParallel(_Forward(self.module), gradient_as_bucket_view=True)
        # A rate of zero: the optimizer works as in training, and every policy meets the same weights.
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.0)

    def _randomise(self) -> None:
        """Wan starts with a head of zeros, which would leave nothing to compare."""
        for parameter in self.module.parameters():
            if parameter.dim() > 1 and not parameter.any():
                nn.init.normal_(parameter, std=0.02)

    def run(self) -> dict[str, Any]:
        batches = [_batch(i, rows) for i, rows in enumerate(self.job.batches)]
        table = self._profile({bucket for rows in self.job.batches for bucket, _ in rows})
        plans = {name: self._plans(name, batches, table) for name in dict.fromkeys(self.job.entries)}
        self.router.attention = self.engine
        times: dict[tuple[int, int], list[StepTime]] = {}
        for repeat in range(1 + self.job.rounds):
            for b, batch in enumerate(batches):
                for key, step in self._turns(b, batch, plans, repeat).items():
                    times.setdefault(key, []).extend([step] if repeat else [])  # the first round warms up
        whole_us = {bucket.name: table.whole_us(bucket) for bucket in table.buckets}
        return {"times": times, "plans": plans if self.rank == 0 else None, "whole_us": whole_us}

    def _turns(
        self, b: int, batch: GlobalBatch, plans: dict[str, list[Plan | None]], repeat: int
    ) -> dict[tuple[int, int], StepTime]:
        """One step of every entry on one batch."""
        steps = {}
        for e in turn_order(len(self.job.entries), b, repeat):
            if (plan := plans[self.job.entries[e]][b]) is not None:
                steps[e, b] = self._step(materialize(batch, plan, self.rank, self.trial.source))
        return steps

    def _profile(self, buckets: Iterable[Bucket]) -> ProfileTable:
        """As the strategy measures it, in the same time; rank 0's table is everybody's."""
        agreement = Agreement(timedelta(minutes=5))
        measurement = Measurement(self.module, self.engine, self.router, agreement, self.trial)
        ordered = tuple(sorted(buckets, key=lambda b: b.num_tokens))
        config = ProfilerConfig(
            progress_bar=False, clock="wall" if has_own_core(self.job.world_size) else "cpu"
        )
        table = measure_table(
            measurement,
            config,
            ordered,
            self.configs,
            self.topology,
            "contiguous",
            _memory(),
            NO_CAP_MIB,
            {},
        )
        texts = [table.to_json()]
        dist.broadcast_object_list(texts, src=0)
        return ProfileTable.from_json(texts[0])

    def _plans(self, name: str, batches: list[GlobalBatch], table: ProfileTable) -> list[Plan | None]:
        """Every rank plans alike, since planning is a function of the table and the batch."""
        config = PlannerConfig(name=name, family="contiguous")
        planner = make_planner(config, table, _memory(), self.topology, HEADS, NO_CAP_MIB)
        plans: list[Plan | None] = []
        for batch in batches:
            try:
                plans.append(planner.plan(batch))
            except PlanningError:
                plans.append(None)
        digests = [None] * self.job.world_size
        dist.all_gather_object(digests, [plan.digest if plan else 0 for plan in plans])
        assert all(d == digests[0] for d in digests), f"ranks plan {name} differently"
        return plans

    def _step(self, batch: RankBatch) -> StepTime:
        """A training step: forward, backward, gradient averaging, optimizer."""
        self.engine.install(batch.schedule)
        self.watch.begin()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        with engine_of_step(self.engine):
            loss = self.parallel(batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        lost = self.watch.lost_share(has_own_core(self.job.world_size))
        return StepTime(wall, cpu, lost, float(loss.detach()))


def _batch(step: int, rows: tuple[tuple[Bucket, int], ...]) -> GlobalBatch:
    return GlobalBatch.of(step, 0, ((f"{b.name}/{i}", b) for b, count in rows for i in range(count)))


def _memory() -> MemoryModel:
    return MemoryModel(ModelGeometry(CONFIG.num_layers, HEADS, WIDTH // HEADS, 4, 20_000, 20_000, 0))
