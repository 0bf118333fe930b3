"""The typed errors of the package. Each names what failed and what to change."""

from __future__ import annotations

from typing import Any


class ZelligeError(Exception):
    """Base of all errors that the package raises on purpose.

    Args:
        message: what failed, naming the thing (sequence, bucket, module, file).
        fix: what the user can change.
        step: optimizer step or global batch at which it happened, if there is one.
        rank: the rank that saw it first, filled in when the error travels to the other ranks.
    """

    def __init__(
        self, message: str, *, fix: str | None = None, step: int | None = None, rank: int | None = None
    ) -> None:
        self.message, self.fix, self.step, self.rank = message, fix, step, rank
        self.agreed = False  # whether every rank raises it, so that nobody must be told
        super().__init__(message)

    def __str__(self) -> str:
        where = [f"step {self.step}"] if self.step is not None else []
        where += [f"rank {self.rank}"] if self.rank is not None else []
        text = f"[{', '.join(where)}] {self.message}" if where else self.message
        return f"{text}\n  What to change: {self.fix}" if self.fix else text

    def to_wire(self) -> dict[str, Any]:
        """Plain JSON types, so that an error can travel between ranks without pickle."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "fix": self.fix,
            "step": self.step,
            "rank": self.rank,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return from_wire, (self.to_wire(),)


class ConfigError(ZelligeError):
    """A setting that does not exist, has the wrong type, or contradicts another one."""


class PlanningError(ZelligeError):
    """No placement was found under the memory cap, or the planner itself failed."""


class ProfileError(ZelligeError):
    """A price table that is missing, foreign to this job, or damaged."""


class EngineError(ZelligeError):
    """An attention call that the engine cannot run exactly."""


class CollectiveError(EngineError):
    """A collective failed because a peer is gone or late. The cause is on the other rank."""


class DataError(ZelligeError):
    """A sample, media file or latent that cannot be used, or ranks that read different data."""


class RankFailure(ZelligeError):
    """A rank left the step because of an exception that is not ours (out of memory, a bug in the model)."""


_TYPES = {
    cls.__name__: cls
    for cls in (
        ZelligeError,
        ConfigError,
        PlanningError,
        ProfileError,
        EngineError,
        CollectiveError,
        DataError,
        RankFailure,
    )
}


def from_wire(wire: dict[str, Any]) -> ZelligeError:
    """The error that `to_wire` described; an unknown type becomes a plain `ZelligeError`."""
    cls = _TYPES.get(wire["type"], ZelligeError)
    return cls(wire["message"], fix=wire.get("fix"), step=wire.get("step"), rank=wire.get("rank"))
