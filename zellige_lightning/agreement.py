"""Decisions that all ranks take together, over a gloo group of their own: small integers and texts, no
pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zellige_lightning.errors import CollectiveError, ZelligeError, from_wire

Result = TypeVar("Result")


class Agreement:
    """Collectives of one thread. Two threads need two objects, since a group keeps one order of operations.

    Args:
        timeout: of every collective; a rank that is gone or late raises `CollectiveError` after that.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._group: dist.ProcessGroup | None = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if self.world_size > 1:
            self._group = dist.new_group(timeout=timeout, backend="gloo")

    def gather(self, values: list[int]) -> list[list[int]]:
        """The integers of every rank, by rank. All ranks pass equally many."""
        if self._group is None:
            return [values]
        mine = torch.tensor(values, dtype=torch.int64)
        everybody = [torch.empty_like(mine) for _ in range(self.world_size)]
        with _named("gather"):
            dist.all_gather(everybody, mine, group=self._group)
        return [row.tolist() for row in everybody]

    def share(self, text: str | None, source: int = 0) -> str:
        """The text of rank `source`, on every rank."""
        if self._group is None:
            assert text is not None
            return text
        payload = torch.frombuffer(bytearray((text or "").encode() or b"\0"), dtype=torch.uint8)
        size = torch.tensor([len(payload)])
        with _named("share"):
            dist.broadcast(size, source, group=self._group)
            if self.rank != source:
                payload = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(payload, source, group=self._group)
        return bytes(payload.tolist()).decode().rstrip("\0")

    def exchange(self, sent: list[Tensor], sizes: list[int]) -> list[Tensor]:
        """Bytes to each rank, for bytes from each.

        Args:
            sent: uint8, by receiving rank. sizes: of what comes, by sending rank.
        """
        if self._group is None:
            return sent
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        with _named("exchange of samples"):
            dist.all_to_all_single(
                received, torch.cat(sent), sizes, [len(part) for part in sent], group=self._group
            )
        return list(received.split(sizes))

    def raise_together(self, error: BaseException | None, report: Sequence[int] = ()) -> list[list[int]]:
        """Raise the error of the lowest failing rank on every rank, if any has one.

        Args:
            report: integers for the others that ride along; equally many on all ranks, also where one failed.

        Returns:
            The report of every rank, by rank.
        """
        gathered = self.gather([int(error is not None), *report])
        failed = [rank for rank, (flag, *_) in enumerate(gathered) if flag]
        if not failed:
            return [row[1:] for row in gathered]
        wire = json.dumps(to_zellige(error, self.rank).to_wire()) if error is not None else None
        agreed = from_wire(json.loads(self.share(wire, failed[0])))
        agreed.agreed = True
        raise agreed from error

    def together(self, work: Callable[[], Result]) -> Result:
        """`work()` on every rank; if it fails on any, the same error on all."""
        result, error = None, None
        try:
            result = work()
        except Exception as caught:
            error = caught
        self.raise_together(error)
        return result  # type: ignore[return-value]

    def on_first(self, work: Callable[[], str]) -> str:
        """The text that `work` returns on rank 0, on every rank; its error as well."""
        text, error = None, None
        if self.rank == 0:
            try:
                text = work()
            except Exception as caught:
                error = caught
        self.raise_together(error)
        return self.share(text)

    def close(self) -> None:
        """Drop the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Turns what gloo raises into a `CollectiveError` that says which agreement failed."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(f"the ranks' {what} before a step failed: {error}") from error


def to_zellige(error: BaseException, rank: int) -> ZelligeError:
    """`error` itself if it is ours, else a `ZelligeError` that carries its type and text."""
    if isinstance(error, ZelligeError):
        error.rank = rank if error.rank is None else error.rank
        return error
    return ZelligeError(f"{type(error).__name__}: {error}", rank=rank)
