"""Ranks as threads of this process: a world of 12 ranks costs milliseconds and needs no ports.

It stands on a process group that PyTorch's own tests use. That module is private, so its absence is said
plainly.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

try:
    from torch.testing._internal.distributed import multi_threaded_pg as threaded
except ImportError as error:  # no test may pass because of this
    raise ImportError(
        "this PyTorch has no torch.testing._internal.distributed.multi_threaded_pg, on which tests/engine"
        " runs ranks as threads; run the tests with a release that has it"
    ) from error

T = TypeVar("T")


def run_threads(function: Callable[[int], T], world_size: int, timeout_s: float = 60.0) -> list[T]:
    """`function(rank)` on every rank of a threaded world; the results by rank.

    Raises:
        Exception: that of the first rank that raised.
        AssertionError: a rank did not end in time.
    """
    results: dict[int, T] = {}
    errors: list[BaseException] = []
    with _threaded_world() as store:

        def work(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                traceback.print_exc()
                threaded.ProcessLocalGroup.exception_handle(error)  # wakes the others

        workers = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout_s)
        assert not any(worker.is_alive() for worker in workers), "a rank waits for ever"
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]


@contextmanager
def _threaded_world() -> Iterator[dist.HashStore]:
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        yield dist.HashStore()
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
