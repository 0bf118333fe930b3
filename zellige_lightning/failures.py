"""No rank waits for a rank that has given up.

Whatever fails on one rank becomes the same typed error on all, quickly. A rank that fails inside a step posts
the error to the store and closes its connections to the others: on gloo nothing else wakes a peer that is
blocked in a collective, neither abort nor destroy. The peers then find the posted error in the store and
raise it in place of their collective's. The rank that hosts the store stays until all have read it.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from zellige_lightning.agreement import to_zellige
from zellige_lightning.errors import CollectiveError, RankFailure, ZelligeError, from_wire

_LOOKUP_S = 1.5  # longer than a post takes, shorter than the 2 s that reports may take beyond the timeout
_COLLECTIVE_MARKS = (
    "gloo",
    "nccl",
    "Connection closed by peer",
    "Connection reset",
    "Timed out",
    "Broken pipe",
)


def _sockets() -> set[str]:
    """Identities of this process's sockets, where the platform tells (Linux)."""
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return set()
    return {target for name in names if (target := _target(name)).startswith("socket:")}


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


class Connections:
    """The sockets of the process groups that were made inside `recorded` blocks of this process."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        before = _sockets()
        yield
        self._known |= _sockets() - before

    def sever(self) -> None:
        """Close the connections to the other ranks, but not those to the store, so that blocked peers
        wake."""
        store_port = os.environ.get("MASTER_PORT", "")
        for name in os.listdir("/proc/self/fd") if self._known else ():
            if _target(name) in self._known:
                _shut_down(int(name), store_port)


def _shut_down(descriptor: int, store_port: str) -> None:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            ports = str(connection.getsockname()[1]), str(connection.getpeername()[1])
            if store_port not in ports:
                connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # not connected, or already closed: nothing to wake
        return


# The default process group outlives a Trainer, so its connections are remembered for the process.
connections = Connections()


class FailureBoard:
    """The store's record of the first failure of a run.

    Args:
        run: number of this run in the process, the same on all ranks; keeps runs apart in one store.
    """

    def __init__(self, run: int) -> None:
        self._key = f"zellige/failure/{run}"
        self._distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        # A connection of its own: the default one may be blocked in another thread.
        self._store = _own_store() if self._distributed else None

    def resolve(self, error: BaseException, where: str, step: int | None) -> BaseException:
        """What this rank raises for `error`: the posted error if a peer failed first, else its own, posted.

        Args:
            where: phase in which it was caught, for the message.
        """
        if self._store is None or not isinstance(error, Exception) or getattr(error, "agreed", False):
            return error
        try:
            wire = self._lookup() if _is_collective(error) else self._post(error, where, step)
        except (RuntimeError, OSError):  # the store's host is gone
            wire = None
        connections.sever()
        if wire is None:
            return _as_collective(error, where, step)
        self._acknowledge()
        posted = from_wire(wire)
        if wire["rank"] == dist.get_rank() and isinstance(error, ZelligeError):
            return error
        return posted

    def _post(self, error: BaseException, where: str, step: int | None) -> dict[str, object]:
        """Post, unless another rank was first; the record that stands."""
        rank = dist.get_rank()
        if isinstance(error, ZelligeError):
            failure: ZelligeError = to_zellige(error, rank)
        else:
            failure = RankFailure(
                f"{where} failed: {type(error).__name__}: {error}",
                fix="see the traceback of that rank; the others stopped because of it",
                rank=rank,
            )
        failure.step = step if failure.step is None else failure.step
        assert self._store is not None
        record = self._store.compare_set(self._key, "", json.dumps(failure.to_wire()))
        return json.loads(record)

    def _lookup(self) -> dict[str, object] | None:
        """The posted record; waits a little, since a peer's connections may close before its post arrives."""
        assert self._store is not None
        deadline = time.monotonic() + _LOOKUP_S
        while not self._store.check([self._key]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        return json.loads(self._store.get(self._key))

    def _acknowledge(self) -> None:
        """Say that this rank has read the record; the host waits until everybody has, at most a little."""
        assert self._store is not None
        count = self._store.add(f"{self._key}/read", 1)
        deadline = time.monotonic() + _LOOKUP_S
        while dist.get_rank() == 0 and count < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.02)
            count = self._store.add(f"{self._key}/read", 0)


def _own_store() -> Any:
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


def _as_collective(error: Exception, where: str, step: int | None) -> Exception:
    """A collective's own error (of DDP's reduction, for one), which names nothing, as one that does."""
    if isinstance(error, ZelligeError) or not _is_collective(error):
        return error
    return CollectiveError(
        f"a collective of all ranks failed in {where}: {error}",
        fix="the cause is on another rank, which is gone or late: see its messages",
        step=step,
    )


def _is_collective(error: BaseException) -> bool:
    """Whether `error` says that a peer is gone, rather than that this rank failed."""
    if isinstance(error, CollectiveError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        mark.lower() in str(error).lower() for mark in _COLLECTIVE_MARKS
    )
