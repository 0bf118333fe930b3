"""When the engine computed, exchanged and waited, block by block; costs one comparison per call when off.

On CUDA a mark is an event on the current stream, so that spans are times of the device; elsewhere it is the
host's clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

Mark = int | torch.cuda.Event


@dataclass(frozen=True)
class Span:
    """One interval of one rank, nanoseconds of the wall clock.

    Args:
        category: `compute`, `wait`, or `exchange` (from its start until its rows were used).
        name: the block, and the kind of exchange.
        site: pass and layer.
    """

    category: str
    name: str
    site: str
    begin_ns: int
    end_ns: int


class Timeline:
    """Records spans between `start` and `stop`."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._open: list[tuple[str, str, str, Mark, Mark]] = []
        self._device = torch.device("cpu")
        self._origin: Mark = 0
        self._origin_ns = 0

    @property
    def recording(self) -> bool:
        return self.step is not None

    def start(self, step: int, device: torch.device) -> None:
        """Forget what was recorded, and record from here on."""
        self.step, self._device, self._open = step, device, []
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # so that host and device agree on the origin
        self._origin_ns = time.time_ns()
        self._origin = self._now()

    def mark(self) -> Mark | None:
        """Now; None while nothing is recorded."""
        return None if self.step is None else self._now()

    def add(self, category: str, name: str, site: str, begin: Mark | None) -> None:
        """A span from `begin` until now; nothing where that is None."""
        if begin is not None and self.step is not None:
            self._open.append((category, name, site, begin, self._now()))

    def stop(self) -> list[Span]:
        """The spans since `start`, in the order in which they ended."""
        if self._device.type == "cuda" and self.recording:
            torch.cuda.synchronize(self._device)
        spans = [
            Span(category, name, site, self._ns(begin), self._ns(end))
            for category, name, site, begin, end in self._open
        ]
        self.step, self._open = None, []
        return spans

    def _now(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ns(self, mark: Mark) -> int:
        if isinstance(mark, int):
            assert isinstance(self._origin, int)
            return self._origin_ns + mark - self._origin
        assert not isinstance(self._origin, int)
        return self._origin_ns + int(1e6 * self._origin.elapsed_time(mark))
