"""`HardwareProfiler` (paper, Sec. IV-B): measures, once per training set-up, what every (bucket,
configuration) costs a participating rank, through the same engine and model that train."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from zellige_lightning.agreement import Agreement
from zellige_lightning.batch import RankBatch, materialize
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.engine.saving import SavePolicy
from zellige_lightning.errors import ConfigError, ProfileError
from zellige_lightning.mixin import require_mixin
from zellige_lightning.placement import (
    Bucket,
    GlobalBatch,
    ParallelConfig,
    PlacementOption,
    Plan,
    Sequence,
    Topology,
    whole,
)
from zellige_lightning.planner import MemoryModel, ProfileTable
from zellige_lightning.profile_cache import short_digest
from zellige_lightning.trial import TrialStep, copy_module, layer_list

_PACK_TOKENS = 2048  # short sequences are timed several at a time, as they will run
_WHOLE = ParallelConfig()


@dataclass(frozen=True)
class ProfilerConfig:
    """Settings of the profiler; keys of `profiler.*` in the configuration.

    Args:
        profile_path: JSON file to reuse or write; None keeps one by fingerprint in the user's cache folder.
        repeats: timed runs per pair; their median counts.
        all_layers_up_to: a model of at most that many layers is timed whole; of a deeper one, one and two
            layers are, and the rest is extrapolated.
    """

    profile_path: str | None = None
    repeats: int = 3
    all_layers_up_to: int = 4

    def file(self, fingerprint: Mapping[str, str | int | float]) -> Path:
        """The profile of a job with that fingerprint."""
        if self.profile_path is not None:
            return Path(self.profile_path)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = f"profile-{short_digest(json.dumps(fingerprint, sort_keys=True))}.json"
        return cache / "zellige_lightning" / name

    def __post_init__(self) -> None:
        for name in ("repeats", "all_layers_up_to"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"profiler.{name} = {value!r}", fix=f"profiler.{name} must be an integer >= 1"
                )

    @classmethod
    def of(cls, settings: ProfilerConfig | Mapping[str, Any] | None) -> ProfilerConfig:
        """From what a user writes. Raises: ConfigError for unknown keys."""
        if settings is None or isinstance(settings, ProfilerConfig):
            return settings or cls()
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(map(str, settings)) - set(known)):
            raise ConfigError(f"unknown profiler settings {unknown}", fix=f"known are {known}")
        return cls(**settings)


class HardwareProfiler(Callback):
    """Prepares planning at the start of a fit: checks the model, loads or measures the price table.

    The strategy attaches one by itself; add your own to change its settings.

    Args:
        settings: as `ProfilerConfig`.
    """

    def __init__(self, **settings: Any) -> None:
        self.config = ProfilerConfig.of(settings)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        from zellige_lightning.strategy import PlacingStrategy

        if isinstance(trainer.strategy, PlacingStrategy):
            trainer.strategy.prepare_planning()


class Measurement:
    """Times steps of copies of the model. All methods that run steps are collectives of the world.

    Args:
        module: the user's module; never run itself.
        trial: runs steps of its copies.
        saving: whose attention is kept, as in training; None for nobody's.
    """

    def __init__(
        self,
        module: LightningModule,
        engine: CoalescedAttentionEngine,
        router: AttentionRouter,
        agreement: Agreement,
        trial: TrialStep,
        config: ProfilerConfig,
        saving: SavePolicy | None = None,
    ) -> None:
        # What `auto` keeps depends on the memory that a plan leaves: without is the price to count on.
        self._saving = saving if saving is not None and saving.mode != "auto" else SavePolicy()
        self._engine, self._router, self._agreement, self._config = engine, router, agreement, config
        self._trial = trial
        layers = layer_list(module, list(require_mixin(module).attention_modules()))
        self._num_layers = len(layers) if layers is not None else 1
        deep = layers is not None and self._num_layers > config.all_layers_up_to
        self._clones = [copy_module(module, depth) for depth in ((1, 2) if deep else (None,))]

    def step_us(self, options: list[PlacementOption], buckets: list[Bucket]) -> float:
        """Median time of a step of the whole model with that placement, slowest rank, microseconds."""
        batch = GlobalBatch(
            0,
            0,
            tuple(Sequence(i, f"profile-{i}", b) for i, b in enumerate(buckets)),
            len(buckets),
            sum(b.num_tokens for b in buckets),
        )
        world = self._agreement.world_size
        plan = Plan(0, world, tuple(options), (0,) * world, (0,) * world)
        rank_batch = materialize(batch, plan, self._agreement.rank, self._trial.source)
        times = [self._timed(clone, rank_batch.to(clone.device)) for clone in self._clones]
        if len(times) == 1:
            return times[0]
        one, two = times
        return one + max(0.0, two - one) * (self._num_layers - 1)

    def all_reduce_us(self, module: LightningModule) -> float:
        """Time to reduce all gradients over the world, which every step pays whatever its placement."""
        if self._agreement.world_size == 1:
            return 0.0
        size = sum(p.numel() for p in module.parameters() if p.requires_grad)
        gradients = torch.zeros(size, device=module.device)
        return self._median(lambda: torch.distributed.all_reduce(gradients), module.device)

    def _timed(self, clone: LightningModule, batch: RankBatch) -> float:
        plan, lengths = batch.plan, [s.num_tokens for s in batch.global_batch.sequences]
        self._engine.install(batch.schedule, self._saving.choose(plan.options, lengths, plan.memory_mib))
        with self._router.answered_by(self._engine), engine_of_step(self._engine):
            time_us = self._median(lambda: self._step(clone, batch), clone.device)
        self._engine.uninstall()
        return time_us

    def _step(self, clone: LightningModule, batch: RankBatch) -> None:
        with torch.enable_grad():
            self._trial.loss(clone, batch).backward()
        for parameter in clone.parameters():
            parameter.grad = None

    def _median(self, work: Callable[[], Any], device: torch.device) -> float:
        """Of the slowest rank's times; the first run warms up and does not count."""
        times = []
        for repeat in range(1 + self._config.repeats):
            self._agreement.gather([0])  # start together
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            elapsed = int(1e6 * (time.perf_counter() - began))
            slowest = max(us for (us,) in self._agreement.gather([elapsed]))
            times += [slowest] if repeat else []
        return statistics.median(times)


def measure_table(
    measurement: Measurement,
    module: LightningModule,
    buckets: tuple[Bucket, ...],
    configs: tuple[ParallelConfig, ...],
    topology: Topology,
    memory: MemoryModel,
    cap_mib: int,
    fingerprint: Mapping[str, str | int | float],
) -> ProfileTable:
    """Prices of every pair that fits the memory cap, with the fixed step cost removed (paper, Sec. IV-B)."""
    world = topology.world_size
    tiny = Bucket("tiny", (1, 1, 1))
    fixed = measurement.step_us([whole(r) for r in range(world)], [tiny] * world)
    prices: dict[tuple[str, ParallelConfig, str], int] = {}
    for bucket in buckets:
        for config in configs:
            if memory.memory_mib(bucket.num_tokens, config) > cap_mib or bucket.num_tokens < config.degree:
                continue
            for name, ranks in _one_set_per_class(topology, config.degree).items():
                if config.is_whole:
                    copies = max(1, min(8, _PACK_TOKENS // bucket.num_tokens))
                    options = [whole(rank) for rank in range(world)] * copies
                else:
                    copies, options = 1, [PlacementOption(config, ranks)]
                time_us = measurement.step_us(options, [bucket] * len(options))
                prices[bucket.name, config, name] = max(1, round((time_us - fixed) / copies))
    fixed += measurement.all_reduce_us(module)
    extrapolated = _extrapolated(buckets, prices)
    return ProfileTable(buckets, prices, extrapolated, round(fixed), fingerprint)


def _extrapolated(
    buckets: tuple[Bucket, ...], prices: Mapping[tuple[str, ParallelConfig, str], int]
) -> dict[str, int]:
    """Whole prices of the buckets that do not fit whole, from those that do. Used only by Eq. (4) and F.

    Raises:
        ProfileError: no bucket fits whole.
    """
    fitting = tuple(b for b in buckets if (b.name, _WHOLE, "node") in prices)
    if not fitting:
        raise ProfileError(
            "no bucket of the catalog fits whole on one rank",
            fix="raise planner.memory_cap_gib, or add a smaller bucket to the catalog",
        )
    known = {key: price for key, price in prices.items() if key[1] == _WHOLE}
    table = ProfileTable(fitting, known, {}, 0, {})
    return {bucket.name: table.whole_us(bucket) for bucket in buckets if bucket not in fitting}


def _one_set_per_class(topology: Topology, degree: int) -> dict[str, tuple[int, ...]]:
    """A rank set of each topology class that consecutive ranks of that degree can have."""
    sets = (tuple(range(s, s + degree)) for s in range(topology.world_size - degree + 1))
    found: dict[str, tuple[int, ...]] = {}
    for ranks in sets:
        found.setdefault(topology.class_of(ranks), ranks)
    return found
