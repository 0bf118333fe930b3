"""How long a step took on this rank."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from zellige_lightning.engine import Counters
from zellige_lightning.lookahead import PlannedStep
from zellige_lightning.report.records import StepRecord


class StepTimer:
    """Wall, busy and own time of forward and backward, microseconds.

    Busy leaves out waiting for other ranks where the device can tell: on CPU it is the thread's processor
    time, on CUDA the same as wall. Own tells a slow rank from those that wait for it: it ends where the
    rank's own backward does, before the reduction of gradients is waited for, and leaves out reductions of
    what is logged. Waiting inside shared attention is part of it.
    """

    def __init__(self) -> None:
        self._events: tuple[torch.cuda.Event, ...] | None = None  # begin, end, end of own work
        self._began = self._ended = (0.0, 0.0)
        self._own_ended: float | None = None
        self._waited_s = 0.0  # in reductions of logged values
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(3))
            self._events[0].record()
        self._began, self._own_ended = (time.perf_counter(), time.thread_time()), None
        self._waited_s, self._waits = 0.0, []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave what happens inside out of the rank's own time."""
        if self._own_ended is not None:  # behind it
            yield
            return
        began, events = time.perf_counter(), None
        if self._events is not None:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
        try:
            yield
        finally:
            self._waited_s += time.perf_counter() - began
            if events is not None:
                events[1].record()
                self._waits.append(events)

    def watch(self, loss: torch.Tensor) -> None:
        """Notice where the backward of `loss` ends on this rank."""
        if loss.requires_grad:
            # What is queued first runs first when the graph is done: before DDP waits for its reductions.
            engine: Any = torch.autograd.Variable._execution_engine
            loss.register_hook(lambda _: engine.queue_callback(self._end_own))

    def _end_own(self) -> None:
        self._own_ended = time.perf_counter()
        if self._events is not None:
            self._events[2].record()

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()
        self._ended = time.perf_counter(), time.thread_time()

    def read(self) -> tuple[int, int, int]:
        """(wall, busy, own)."""
        if self._events is not None:
            begin, end, own_end = self._events
            end.synchronize()
            wall = int(1e3 * begin.elapsed_time(end))
            waited = sum(first.elapsed_time(last) for first, last in self._waits)
            own = begin.elapsed_time(own_end if self._own_ended is not None else end) - waited
            return wall, wall, max(0, int(1e3 * own))
        wall_us, busy_us = (int(1e6 * (e - b)) for b, e in zip(self._began, self._ended, strict=True))
        ended = self._own_ended if self._own_ended is not None else self._ended[0]
        return wall_us, busy_us, max(0, int(1e6 * (ended - self._began[0] - self._waited_s)))


def record_of(step: PlannedStep, reports: Sequence[Sequence[int]]) -> StepRecord:
    """The record of a step, from what each rank reports: wall, busy and own microseconds, then its
    counters."""
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
        counters=tuple(Counters.of_integers(report[3:]) for report in reports),
    )
