"""How long a step took on this rank."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from zellige_lightning.engine import Counters
from zellige_lightning.lookahead import PlannedStep
from zellige_lightning.report.records import StepRecord


class StepTimer:
    """Wall and busy time of forward and backward, microseconds. Busy leaves out waiting for other ranks
    where the device can tell: on CPU it is the thread's processor time, on CUDA the same as wall."""

    def __init__(self) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._began = self._ended = (0.0, 0.0)

    def start(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._began = time.perf_counter(), time.thread_time()

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()
        self._ended = time.perf_counter(), time.thread_time()

    def read(self) -> tuple[int, int]:
        if self._events is not None:
            self._events[1].synchronize()
            wall = 1e3 * self._events[0].elapsed_time(self._events[1])
            return int(wall), int(wall)
        wall, busy = (1e6 * (end - begin) for begin, end in zip(self._began, self._ended, strict=True))
        return int(wall), int(busy)


def record_of(step: PlannedStep, reports: Sequence[Sequence[int]]) -> StepRecord:
    """The record of a step, from what each rank reports: wall and busy microseconds, then its counters."""
    wall_us, busy_us = zip(*(report[:2] for report in reports), strict=True)
    plans = [wave.plan for wave in step.waves]
    longest = max(step.waves, key=lambda wave: wave.plan.makespan_us)
    loads = [sum(loads) for loads in zip(*(plan.loads_us for plan in plans), strict=True)]
    return StepRecord(
        step=step.batch.step,
        batch=step.batch,
        plan=longest.plan,
        predicted_us=sum(plan.predicted_us for plan in plans),
        measured_us=max(1, *wall_us),
        imbalance=max(loads) * len(loads) / max(1, sum(loads)),
        measured_imbalance=max(busy_us) * len(busy_us) / max(1, sum(busy_us)),
        num_splits=sum(plan.num_splits for plan in plans),
        solve_ms=step.prepare_ms,
        exposed_ms=step.exposed_ms,
        num_waves=len(plans),
        hit_rate=step.hit_rate,
        wave=longest.global_batch if len(plans) > 1 else None,
        counters=tuple(Counters.of_integers(report[2:]) for report in reports),
    )
