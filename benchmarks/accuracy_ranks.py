"""What every process of `benchmarks/profile_accuracy.py` runs: the profiler, then real training steps of
every plan, the held-out ones after the prices were frozen."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from accuracy_figures import Row, settled
from accuracy_memory import letting_go
from accuracy_plans import BUCKETS, Candidate, Case, Options, is_held_out, make_cases
from ranks import has_own_core
from step_ranks import HEADS, NO_CAP_MIB, Job, _Ranks

from zellige_lightning.agreement import Agreement
from zellige_lightning.batch import RankBatch, materialize
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.geometry import held_and_peak, measure_geometry
from zellige_lightning.placement import GlobalBatch, Plan
from zellige_lightning.placement.plan import rank_sums
from zellige_lightning.planner import MemoryModel, PlannerConfig, ProfileTable, make_planner
from zellige_lightning.planner.calibration import Calibration, Observation, calibrate, held_out_errors
from zellige_lightning.planner.filling import filling_of
from zellige_lightning.profile_rounds import Rounds, base, informative_first, probes_of
from zellige_lightning.profile_runs import Measurement
from zellige_lightning.profile_table import table_of
from zellige_lightning.trace import attention_shape
from zellige_lightning.trial import copy_module

MIB = 1 << 20
OPTIMIZER_COPIES = 4  # parameters, gradient buckets, two moments


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Args:
        repeats: steps of each plan that count, of twice as many.
        profiler_repeats, profiler_budget_s: as `ProfilerConfig`.
    """

    num_batches: int
    plans_per_batch: int
    repeats: int
    profiler_repeats: int
    profiler_budget_s: float


@dataclass(frozen=True)
class Step:
    """Makespan and processor seconds of the busiest rank of one step, and the largest share of it that a rank
    lost to what else the machine did."""

    wall_s: float
    cpu_s: float
    lost: float


Times = dict[int, list[Step]]  # by the identity of the trial


@dataclass(frozen=True)
class Trial:
    """One plan of one batch and this rank's part of it."""

    number: int
    kind: str
    options: Options
    batch: RankBatch


def measured_s(steps: Sequence[Step], clock: str) -> float:
    """Median over the calmer steps, as the published figures."""
    return settled(
        [step.wall_s if clock == "wall" else step.cpu_s for step in steps], [step.lost for step in steps]
    )


def run_rank(rank: int, world: int, settings: Settings) -> dict[str, Any]:
    """Rows of all plans, the profile, and when what happened; the same on every rank."""
    return _Accuracy(rank, world, settings).run()


class _Accuracy(_Ranks):
    def __init__(self, rank: int, world: int, settings: Settings) -> None:
        super().__init__(rank, Job(world, "", (), (), 0))
        self.world, self.settings = world, settings
        self.clock = "wall" if has_own_core(world) else "cpu"  # of ranks that share cores
        self.agreement = Agreement(timedelta(minutes=5))
        self.configs = tuple(c for c in self.configs if world % c.degree == 0)
        self.cases = make_cases(self.topology, self.configs, settings.num_batches, settings.plans_per_batch)

    def run(self) -> dict[str, Any]:
        began = time.perf_counter()
        tables = self._tables()
        profiling_s = time.perf_counter() - began
        memory = self._memory()
        trials = [trial for case in self.cases for trial in self._trials(case, tables, memory)]
        self.router.attention = self.engine
        known = [trial for trial in trials if not is_held_out(trial.number)]
        held = [trial for trial in trials if is_held_out(trial.number)]
        times = self._measure(known)
        calibrations = {
            clock: self._calibrated(table, known, times, clock) for clock, table in tables.items()
        }
        plain, tables = tables, {c: calibrations[c].applied_to(table) for c, table in tables.items()}
        frozen = hashlib.sha256("".join(t.to_json() for t in tables.values()).encode()).hexdigest()
        frozen_at = time.time()
        revisited = list({trial.number: trial for trial in reversed(known)}.values())  # one of each batch
        later = self._measure([*held, *revisited])
        times |= {id(trial): later[id(trial)] for trial in held}
        again = {id(trial): later[id(trial)] for trial in revisited}
        peaks = {id(trial): self._peak_mib(trial) for trial in held}
        rows = [
            self._row(trial, times[id(trial)], again.get(id(trial), []), peaks.get(id(trial)), tables, memory)
            for trial in trials
        ]
        return {
            "rows": rows,
            "ablation": {clock: self._ablation(plain[clock], known, held, times, clock) for clock in plain},
            "calibration": {
                clock: {"model": c.model, "terms": asdict(c.terms), "left_out_pct": dict(c.errors_pct)}
                for clock, c in calibrations.items()
            },
            "profile": tables[self.clock].to_json(),
            "frozen_sha256": frozen,
            "frozen_at": frozen_at,
            "profiling_seconds": profiling_s,
            "seconds": time.perf_counter() - began,
        }

    def _tables(self) -> dict[str, ProfileTable]:
        """Prices by wall clock and by processor time, from the same steps; rank 0's are everybody's."""
        measurement = Measurement(self.module, self.engine, self.router, self.agreement, self.trial)
        family = "contiguous"
        probes = [
            base(),
            *informative_first(
                probes_of(BUCKETS, self.configs, self.topology, family, lambda bucket, config: True)
            ),
        ]
        rounds = Rounds(measurement, self.settings.profiler_budget_s, self.settings.profiler_repeats)
        rounds.run(probes)
        tables = {}
        for clock in ("wall", "cpu"):
            reduce_us = measurement.all_reduce_us(clock)
            text = table_of(rounds, probes[1:], BUCKETS, reduce_us, {}, clock).to_json()
            tables[clock] = ProfileTable.from_json(self.agreement.share(text))
        return tables

    def _memory(self) -> MemoryModel:
        clone = copy_module(self.module, 1)
        shape = attention_shape(clone, self.router, self.trial)
        return MemoryModel(
            measure_geometry(self.module, self.router, self.trial, shape, configs=self.configs)
        )

    def _trials(self, case: Case, tables: dict[str, ProfileTable], memory: MemoryModel) -> list[Trial]:
        """The case's candidates and what the planner makes of its batch; without those that use an option
        which a short profiling budget has not reached."""
        config = PlannerConfig(name="exact", family="contiguous")
        planner = make_planner(config, tables[self.clock], memory, self.topology, HEADS, NO_CAP_MIB)
        ours = Candidate("exact", planner.plan(case.batch).options)
        known = {candidate.options for candidate in case.candidates}
        wanted = [*case.candidates, *([ours] if ours.options not in known else [])]
        candidates = [c for c in wanted if all(self._is_priced(case, c, t) for t in tables.values())]
        table = tables[self.clock]
        return [
            Trial(case.batch.step, c.kind, c.options, self._materialize(case.batch, c.options, table))
            for c in candidates
        ]

    def _is_priced(self, case: Case, candidate: Candidate, table: ProfileTable) -> bool:
        pairs = zip(case.batch.sequences, candidate.options, strict=True)
        return all(
            table.price_us(s.bucket, o.config, self.topology.class_of(o.ranks)) is not None for s, o in pairs
        )

    def _materialize(self, batch: GlobalBatch, options: Options, table: ProfileTable) -> RankBatch:
        nothing = (0,) * self.world
        plan = Plan(batch.step, self.world, options, nothing, nothing)
        plan = replace(plan, filling=filling_of(plan, batch, table, self.topology))  # as the planner does
        return materialize(batch, plan, self.rank, self.trial.source)

    def _measure(self, trials: Sequence[Trial]) -> Times:
        """Twice as many steps of every plan as count; they are interleaved, the first round only warms up."""
        times: Times = {id(trial): [] for trial in trials}
        for repeat in range(1 + 2 * self.settings.repeats):
            for trial in trials:
                step = self._training_step(trial.batch)
                times[id(trial)] += [step] if repeat else []
        return times

    def _observations(self, trials: Sequence[Trial], times: Times, clock: str) -> list[Observation]:
        return [
            Observation(
                trial.options,
                tuple(s.bucket for s in trial.batch.global_batch.sequences),
                1e6 * measured_s(times[id(trial)], clock),
                trial.number,
            )
            for trial in trials
        ]

    def _calibrated(
        self,
        table: ProfileTable,
        known: Sequence[Trial],
        times: Times,
        clock: str,
    ) -> Calibration:
        return calibrate(table, self.topology, self._observations(known, times, clock))

    def _ablation(
        self,
        table: ProfileTable,
        known: Sequence[Trial],
        held: Sequence[Trial],
        times: Times,
        clock: str,
    ) -> dict[str, tuple[float, float]]:
        """Of every form of the model, fitted to the known plans: MAPE and bias in % on the held-out ones."""
        return held_out_errors(
            table,
            self.topology,
            self._observations(known, times, clock),
            self._observations(held, times, clock),
        )

    def _training_step(self, batch: RankBatch) -> Step:
        """A training step; forward and backward with the averaging of gradients are timed, as the strategy
        does."""
        self.engine.install(batch.schedule)
        self.watch.begin()
        dist.barrier()
        began = time.perf_counter(), time.process_time()
        with engine_of_step(self.engine):
            loss = self.parallel(batch)
        loss.backward()
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        lost = self.watch.lost_share(has_own_core(self.world))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        rows = self.agreement.gather([int(1e6 * value) for value in (*spent, lost)])
        return Step(*(max(values) / 1e6 for values in zip(*rows, strict=True)))

    def _peak_mib(self, trial: Trial) -> list[float]:
        """Of each rank: the peak of a step, without what is there between steps."""
        self.engine.install(trial.batch.schedule)
        device = self.module.device

        def forward() -> Any:
            with engine_of_step(self.engine):
                return self.parallel(trial.batch)

        with letting_go(self.engine):
            _, peak = held_and_peak(forward, lambda loss: loss.backward(), device)
        self.optimizer.zero_grad(set_to_none=True)
        return [row[0] / MIB for row in self.agreement.gather([peak])]

    @property
    def _base_mib(self) -> float:
        """What is there between steps, exact: parameters, gradient buckets and the optimizer's moments."""
        size = sum(p.numel() * p.element_size() for p in self.module.parameters() if p.requires_grad)
        return OPTIMIZER_COPIES * size / MIB

    def _row(
        self,
        trial: Trial,
        times: list[Step],
        again: list[Step],
        peaks: list[float] | None,
        tables: dict[str, ProfileTable],
        memory: MemoryModel,
    ) -> Row:
        batch, options = trial.batch.global_batch, trial.options
        splits = [option for option in options if not option.config.is_whole]
        wholes = {option.ranks[0] for option in options if option.config.is_whole}
        needs = [
            memory.sequence_bytes(s.num_tokens, o.config)
            for s, o in zip(batch.sequences, options, strict=True)
        ]
        predicted = memory.geometry.step_bytes + max(rank_sums(options, needs, self.world))
        return Row(
            batch=trial.number,
            kind=trial.kind,
            digest=trial.batch.plan.digest,
            held_out=is_held_out(trial.number),
            splits=len(splits),
            mixed=any(rank in wholes for option in splits for rank in option.ranks),
            predicted_s=self._predicted_s(trial, tables["wall"]),
            predicted_cpu_s=self._predicted_s(trial, tables["cpu"]),
            wall_s=tuple(step.wall_s for step in times),
            cpu_s=tuple(step.cpu_s for step in times),
            lost=tuple(step.lost for step in times),
            again_wall_s=tuple(step.wall_s for step in again),
            again_cpu_s=tuple(step.cpu_s for step in again),
            again_lost=tuple(step.lost for step in again),
            memory_mib=None if peaks is None else self._base_mib + max(peaks),
            predicted_mib=self._base_mib + predicted / MIB,
        )

    def _predicted_s(self, trial: Trial, table: ProfileTable) -> float:
        prices = []
        for sequence, option in zip(trial.batch.global_batch.sequences, trial.options, strict=True):
            price = table.price_us(sequence.bucket, option.config, self.topology.class_of(option.ranks))
            assert price is not None, f"{sequence.bucket.name} under {option.config} has no price"
            prices.append(price)
        loads = rank_sums(trial.options, prices, self.world)
        starts = table.start_loads_us(trial.options, self.topology)
        return (max(map(sum, zip(loads, starts, strict=True))) + table.fixed_us) / 1e6
