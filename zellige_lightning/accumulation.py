"""How many global batches make an optimizer step, as a trainer will decide it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler


def _schedule(trainer: Any) -> GradientAccumulationScheduler | None:
    return next((c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)), None)


def accumulates(trainer: Any) -> bool:
    """Whether any optimizer step takes more than one batch."""
    schedule = _schedule(trainer)
    if schedule is not None:
        return schedule.going_to_accumulate_grad_batches()
    return bool(trainer.accumulate_grad_batches > 1)


def window_in(trainer: Any, epoch: int) -> int:
    """Global batches per optimizer step in that epoch, also where a callback has yet to switch to it."""
    schedule = _schedule(trainer)
    if schedule is not None:
        return schedule.get_accumulate_grad_batches(epoch)
    return int(trainer.accumulate_grad_batches)
