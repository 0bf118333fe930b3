"""The learning rate over the steps of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zellige_lightning.errors import ConfigError

SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class RateSchedule:
    """A linear rise over `warmup_steps`, then constant, or half a cosine down to `least` at `decay_steps`.

    Raises:
        ConfigError: an unknown name, or a cosine without an end behind the rise.
    """

    name: str = "constant"
    warmup_steps: int = 100
    decay_steps: int | None = None
    least: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ConfigError(f"schedule={self.name!r}", fix=f"choose one of {', '.join(SCHEDULES)}")
        if self.warmup_steps < 0 or not 0.0 <= self.least <= 1.0:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps}, min_lr_ratio={self.least}",
                fix="steps are not negative, the ratio is in 0 to 1",
            )
        if self.name == "cosine" and (self.decay_steps is None or self.decay_steps <= self.warmup_steps):
            raise ConfigError(
                f"a cosine of {self.warmup_steps} warm-up steps that ends at step {self.decay_steps}",
                fix="set trainer.max_steps or model.decay_steps above model.warmup_steps",
            )

    def __call__(self, step: int) -> float:
        """Share of the full rate in optimizer step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        assert self.decay_steps is not None
        done = min(1.0, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        return self.least + (1.0 - self.least) * 0.5 * (1.0 + math.cos(math.pi * done))
