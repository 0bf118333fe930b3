"""What is known of a running step: what was counted, what was recorded, and where it is, for messages."""

from __future__ import annotations

from collections import Counter

import torch

from zellige_lightning.engine.counters import Counters
from zellige_lightning.engine.timeline import Mark, Timeline
from zellige_lightning.placement import Block, Topology

_MOST_SCHEDULES = 64  # whose calls are counted at a time


class StepObserver:
    """Shared by everything in an engine that computes or exchanges.

    Attributes:
        topology: tells links inside a node from those between nodes; None where all ranks share one.
        step: the global batch, where somebody says so.
        layer: attention calls of the forward before this one; in backward, those before the call that it
            belongs to.
        phase: `forward`, `recomputation` or `backward`.
    """

    def __init__(self) -> None:
        self.counters, self.timeline = Counters(), Timeline()
        self.topology: Topology | None = None
        self.step: int | None = None
        self.layer, self.phase = 0, "forward"
        self._calls: dict[int, Counter[str]] = {}

    def enter(self, schedule_id: int, phase: str) -> None:
        """An attention call begins.

        Backward walks the calls of forward from the last to the first, and a recomputation belongs to the
        backward that comes next. (Of a region of several layers it names the last one.)
        """
        calls = self._calls.setdefault(schedule_id, Counter())
        if len(self._calls) > _MOST_SCHEDULES:
            del self._calls[next(iter(self._calls))]
        # Inside a running backward a forward is a recomputation.
        if phase == "forward" and torch._C._current_graph_task_id() != -1:
            phase = "recomputation"
        self.phase = phase
        if phase == "forward":
            self.layer = calls["forward"]
        else:
            self.layer = max(0, calls["forward"] - 1 - calls["backward"])
        calls[phase] += 1

    @property
    def site(self) -> str:
        return f"{self.phase}, layer {self.layer}"

    def kernel_begins(self, which: str, kv_bytes: int = 0) -> Mark | None:
        """Counts a kernel call of pass `which` over that much of a split sequence's keys and values; returns
        what is to be given to `computed`."""
        self.counters.kernel_calls[which] += 1
        self.counters.resident(kv_bytes)
        return self.timeline.mark()

    def computed(self, block: Block, begin: Mark | None) -> None:
        if begin is not None:
            self.timeline.add("compute", name_of(block), self.site, begin)


def name_of(block: Block) -> str:
    """For messages."""
    if block.config.is_whole:
        return f"{len(block.segments)} whole sequences"
    sequences = [str(s.sequence) for s in block.segments]
    shown = ", ".join(sequences[:4] + ["..."] * (len(sequences) > 4))
    return f"sequence {shown} split {block.config} over ranks {block.ranks}"
