"""Runs in which every batch is dealt to waves and placed at random: harder than what a planner would do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningDataModule

from tests.test_placement_invariance import placed_at_random
from zellige_lightning import lookahead
from zellige_lightning.placement import GlobalBatch, Plan, whole
from zellige_lightning.planner.deferral import PlannedBatch
from zellige_lightning.planner.waves import Wave


class OneSource(LightningDataModule):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source

    def train_dataloader(self) -> Any:
        return self.source


class Dealer:
    """A planner. `busy` of the ranks get tokens."""

    hit_rate = 0.0

    def __init__(self, num_waves: int, world: int, busy: int) -> None:
        self._num_waves, self._world, self._busy = num_waves, world, busy

    def use(self, *prices: Any) -> None:
        """Its plans depend on the batch alone."""

    def plan_ladder(self, batch: GlobalBatch, carried: Any = ()) -> PlannedBatch:
        rng = random.Random(batch.step)
        order = rng.sample(range(len(batch.sequences)), len(batch.sequences))
        dealt = [tuple(sorted(order[i :: self._num_waves])) for i in range(self._num_waves)]
        return PlannedBatch(batch, tuple(self._plan(rng, batch, members) for members in dealt if members))

    def _plan(self, rng: random.Random, batch: GlobalBatch, members: tuple[int, ...]) -> Wave:
        part, nothing = batch.part(members), (0,) * self._world
        sequences = tuple({"key": s.key} for s in part.sequences)
        options = placed_at_random(rng, self._busy, sequences, aligned=True)
        if self._busy == 1:
            options = (whole(0),) * len(sequences)
        return Wave(members, part, Plan(batch.step, self._world, options, nothing, nothing))


@contextmanager
def planned_by(planner: Any) -> Iterator[None]:
    """Whatever prepares steps in this process plans with it."""
    original = lookahead.StepPreparer.__init__

    def init(self: Any, agreement: Any, _: Any, *rest: Any, **named: Any) -> None:
        original(self, agreement, planner, *rest, **named)

    lookahead.StepPreparer.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        lookahead.StepPreparer.__init__ = original  # type: ignore[method-assign]
