"""Settings of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from zellige_lightning.engine.groups import TRANSPORTS
from zellige_lightning.engine.kernel_choice import KERNELS
from zellige_lightning.engine.saving import SavePolicy
from zellige_lightning.errors import ConfigError


@dataclass(frozen=True)
class EngineConfig:
    """Keys of `engine.*` in the configuration.

    Args:
        max_schedules: schedules that are kept for backwards that come later than the next forward.
        save_attention: whose attention output checkpointed layers keep: `none`, `anchors` (the split
            sequences), `all`, or `auto` (as many as the memory left under the cap holds, longest first).
        transport: `groups` gives each rank set a process group; `parent` sends everything point to point over
            one group of all ranks; `auto` uses a rank set's group where there is one, else the parent.
        max_communicators: bound on the process groups that one rank joins; a communicator of a GPU takes
            0.5 to 0.7 GB.
        gather_chunks: an all-gather of keys and values goes in up to that many chunks of heads, one in flight
            while another is computed.
        kernel: of attention; `auto` is the best that the device, the dtype and the head dim allow, `math` an
            explicit softmax for checking others.
        trace_steps: global batches whose timeline is written next to the logs: how many from the first of
            the run on, or a list of their numbers.
        debug: compare step, plan and schedule of all ranks once more right before each step; all compare
            while a step is prepared anyway.

    Raises:
        ConfigError: a value that makes no sense.
    """

    max_schedules: int = 256
    save_attention: str = "none"
    transport: str = "auto"
    max_communicators: int = 16
    gather_chunks: int = 4
    kernel: str = "auto"
    trace_steps: int | tuple[int, ...] = 0
    debug: bool = False

    def __post_init__(self) -> None:
        SavePolicy(self.save_attention)
        for name in ("max_schedules", "max_communicators", "gather_chunks"):
            if not _is_integer(value := getattr(self, name)) or value < 1:
                raise ConfigError(f"engine.{name} = {value!r}", fix="an integer >= 1")
        if self.transport not in TRANSPORTS:
            raise ConfigError(f"engine.transport = {self.transport!r}", fix=f"choose one of {TRANSPORTS}")
        if self.kernel not in KERNELS:
            raise ConfigError(f"engine.kernel = {self.kernel!r}", fix=f"choose one of {KERNELS}")
        if not isinstance(self.debug, bool):
            raise ConfigError(f"engine.debug = {self.debug!r}", fix="true or false")
        object.__setattr__(self, "trace_steps", _steps(self.trace_steps))

    @property
    def priced(self) -> str:
        """The settings on which prices depend."""
        names = ("save_attention", "transport", "max_communicators", "gather_chunks")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    @classmethod
    def of(cls, settings: EngineConfig | Mapping[str, Any] | None) -> EngineConfig:
        """From what a user writes. Raises: ConfigError for unknown keys."""
        if settings is None or isinstance(settings, EngineConfig):
            return settings or cls()
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(map(str, settings)) - set(known)):
            raise ConfigError(f"unknown engine settings {unknown}", fix=f"known are {known}")
        return cls(**settings)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _steps(given: Any) -> int | tuple[int, ...]:
    """A count, or numbers of global batches."""
    if _is_integer(given) and given >= 0:
        return int(given)
    if isinstance(given, Iterable) and not isinstance(given, str):
        numbers = tuple(given)
        if all(_is_integer(n) and n >= 0 for n in numbers):
            return numbers
    raise ConfigError(f"engine.trace_steps = {given!r}", fix="a number of steps, or a list such as [3, 10]")
