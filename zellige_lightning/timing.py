"""How long a step took on this rank."""

from __future__ import annotations

import time

import torch


class StepTimer:
    """Wall and busy time of forward and backward, microseconds. Busy leaves out waiting for other ranks where the
    device can tell: on CPU it is the thread's processor time, on CUDA the same as wall."""

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
