"""`HardwareProfiler` (paper, Sec. IV-B): measures, once per training set-up, what every (bucket,
configuration) costs a participating rank, through the same engine and model that train."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from tqdm.auto import tqdm

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement import Bucket, ParallelConfig, Topology
from zellige_lightning.planner import MemoryModel, ProfileTable
from zellige_lightning.planner.calibration import Calibration, Observation, calibrate
from zellige_lightning.planner.filling import filling_of
from zellige_lightning.profile_cache import short_digest
from zellige_lightning.profile_mixes import MixMaker, observed
from zellige_lightning.profile_rounds import Rounds, base, informative_first, probes_of
from zellige_lightning.profile_runs import Measurement
from zellige_lightning.profile_table import not_offered, table_of

_SINGLE_SHARE = 0.75  # of the time budget, for prices of single sequences; the rest is for mixed plans


@dataclass(frozen=True)
class ProfilerConfig:
    """Settings of the profiler; keys of `profiler.*` in the configuration.

    Args:
        profile_path: JSON file to reuse or write; None keeps one by fingerprint in the user's cache folder.
        repeats: timed runs per pair; their median counts. Pairs that take long get fewer, noisy ones up to
            three times as many.
        all_layers_up_to: a model of at most that many layers is timed whole; of a deeper one, one and two
            layers are, and the rest is extrapolated.
        mixed_plans: steps of mixed placements that are timed at the end, to correct the prices by what
            sequences cost beside others; 0 leaves the prices as they are.
        time_budget_s: what is not timed by then is interpolated, and marked so.
        progress_bar: show one on rank 0 while measuring.
        clock: `wall`, or `cpu` where ranks share cores: the processor time of a rank, which other programs
            hardly change.
    """

    profile_path: str | None = None
    repeats: int = 5
    all_layers_up_to: int = 4
    mixed_plans: int = 12
    time_budget_s: float = 300.0
    progress_bar: bool = True
    clock: str = "wall"

    def file(self, fingerprint: Mapping[str, str | int | float]) -> Path:
        """The profile of a job with that fingerprint."""
        if self.profile_path is not None:
            return Path(self.profile_path)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        name = f"profile-{short_digest(json.dumps(fingerprint, sort_keys=True))}.json"
        return cache / "zellige_lightning" / name

    def shown(self, trainer_shows: bool) -> ProfilerConfig:
        """Without a bar where the trainer has none."""
        return replace(self, progress_bar=self.progress_bar and trainer_shows)

    def __post_init__(self) -> None:
        for name, low in (("repeats", 1), ("all_layers_up_to", 1), ("mixed_plans", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(
                    f"profiler.{name} = {value!r}", fix=f"profiler.{name} must be an integer >= {low}"
                )
        if self.clock not in ("wall", "cpu"):
            raise ConfigError(f"profiler.clock = {self.clock!r}", fix="choose wall or cpu")
        budget = self.time_budget_s
        if (
            isinstance(budget, bool)
            or not isinstance(budget, int | float)
            or not 0.0 <= budget < float("inf")
        ):
            raise ConfigError(
                f"profiler.time_budget_s = {budget!r}",
                fix="give a number of seconds; 0 times next to nothing",
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
        from zellige_lightning.placing import PlacingStrategy

        if isinstance(trainer.strategy, PlacingStrategy):
            trainer.strategy.prepare_planning()


def measure_table(
    measurement: Measurement,
    config: ProfilerConfig,
    buckets: tuple[Bucket, ...],
    configs: tuple[ParallelConfig, ...],
    topology: Topology,
    family: str,
    memory: MemoryModel,
    cap_mib: int,
    fingerprint: Mapping[str, str | int | float],
) -> ProfileTable:
    """Prices of every pair that fits the memory cap, with the fixed step cost removed (paper, Sec. IV-B). A
    collective.

    Raises:
        ProfileError: no bucket fits whole.
    """

    def fits(bucket: Bucket, theta: ParallelConfig) -> bool:
        return memory.memory_mib(bucket.num_tokens, theta) <= cap_mib

    probes = [base(), *informative_first(probes_of(buckets, configs, topology, family, fits))]
    shown = config.progress_bar and measurement.rank == 0
    with tqdm(desc="Profiling", unit="step", disable=not shown, leave=False) as bar:

        def progress(done: int, planned: int) -> None:
            bar.total = max(done, planned)
            bar.update(done - bar.n)

        single_s = config.time_budget_s * (1.0 if not config.mixed_plans else _SINGLE_SHARE)
        rounds = Rounds(measurement, single_s, config.repeats, config.clock, progress)
        rounds.run(probes)
    reduce_us = measurement.all_reduce_us(config.clock)
    table = table_of(rounds, probes[1:], buckets, reduce_us, fingerprint, config.clock)
    # Every rank must draw and correct alike; times are known to all, but sums may differ in the last bit.
    table = ProfileTable.from_json(measurement.share(table.to_json()))
    _report(table, configs, rounds)
    if not config.mixed_plans:
        return table
    mixes = MixMaker(table, topology, family, memory, cap_mib).mixes(config.mixed_plans)
    fill = partial(filling_of, table=table, topology=topology)
    steps = observed(measurement, mixes, config.repeats, config.time_budget_s, config.clock, fill)
    calibration = calibrate(table, topology, [_with_reduction(step, reduce_us) for step in steps])
    _report_calibration(calibration, len(steps))
    return calibration.applied_to(table)


def _with_reduction(step: Observation, reduce_us: float) -> Observation:
    """Copies of the model reduce no gradients; training steps do."""
    return replace(step, measured_us=step.measured_us + reduce_us)


def _report_calibration(calibration: Calibration, num_steps: int) -> None:
    errors = ", ".join(f"{name} {error:.1f} %" for name, error in calibration.errors_pct.items())
    rank_zero_info(
        f"zellige: prices corrected by {num_steps} mixed steps, model {calibration.model!r}"
        f" (error on mixes left out: {errors})"
    )


def _report(table: ProfileTable, configs: tuple[ParallelConfig, ...], rounds: Rounds) -> None:
    missing, spilled = not_offered(table, configs, rounds)
    seconds = rounds.measurement.elapsed_s
    rank_zero_info(
        f"zellige: profiled {len(table.prices_us) - len(table.interpolated)} prices in {seconds:.1f} s,"
        f" interpolated {len(table.interpolated)}"
    )
    if table.start_us:
        starts = (f"{config} {us / 1e3:.1f} ms" for (config, _), us in sorted(table.start_us.items()))
        rank_zero_info(f"zellige: starts of shared calls: {', '.join(starts)}")
    if missing:
        rank_zero_info(
            f"zellige: not timed within profiler.time_budget_s, so not offered: {', '.join(missing)}"
        )
    if spilled:
        rank_zero_info(f"zellige: out of memory while profiling, so not offered: {', '.join(spilled)}")
