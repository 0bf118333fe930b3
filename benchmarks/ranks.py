"""Runs a function on N processes of this machine, each pinned to a core of its own where there are enough."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import date, timedelta
from pathlib import Path
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

CORES = sorted(os.sched_getaffinity(0))


def pin(rank: int) -> None:
    """One core and one thread for this rank; ranks share cores where there are fewer."""
    os.sched_setaffinity(0, {CORES[rank % len(CORES)]})
    torch.set_num_threads(1)


def has_own_core(world_size: int) -> bool:
    """Whether every rank has; if not, wall clock says nothing."""
    return world_size <= len(CORES)


def queued_s() -> float:
    """How long this process's threads were ready to run and had no core, so far; 0 where the system does
    not tell."""
    total = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            total += int(thread.read_text().split()[1])
    return total * 1e-9


class CoreWatch:
    """How much of a step a rank lost to what else the machine does, as a share of it: it was ready to run and
    had no core, or its core was slower than at its best, as where another machine runs on the same one. The
    second is told by a fixed loop before and behind the step."""

    LOOP = 100_000  # some milliseconds

    def __init__(self) -> None:
        self._best_s = float("inf")

    def begin(self) -> None:
        self._before_s = self._loop_s()
        self._queued_s, self._began_s = queued_s(), time.perf_counter()

    def lost_share(self, counts_queue: bool = True) -> float:
        """Since `begin`. Ranks that share cores queue for each other, which says nothing."""
        waited = (queued_s() - self._queued_s) / (time.perf_counter() - self._began_s)
        slowest_s = max(self._before_s, self._loop_s())
        return slowest_s / self._best_s - 1.0 + (waited if counts_queue else 0.0)

    def _loop_s(self) -> float:
        began, total = time.thread_time(), 0
        for number in range(self.LOOP):
            total += number
        spent = time.thread_time() - began
        self._best_s = min(self._best_s, spent)
        return spent


def machine() -> dict[str, str]:
    """What a reader needs to judge a figure; nothing that names this machine."""
    model = next(
        (line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")),
        platform.processor() or "unknown processor",
    )
    return {
        "date": date.today().isoformat(),
        "processor": model,
        "cores": str(len(CORES)),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """`function(rank, *args)` on every rank of a gloo world; the results by rank."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_main, args=(function, rank, world_size, port, results, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    gathered = dict(_next(results, processes) for _ in processes)
    for process in processes:
        process.join()
    return [gathered[rank] for rank in range(world_size)]


def _next(results: Any, processes: list[Any]) -> tuple[int, Any]:
    """What the next rank returns.

    Raises:
        RuntimeError: a rank failed, and has said why, or none returns within half an hour.
    """
    for _ in range(1800):
        try:
            found: tuple[int, Any] = results.get(timeout=1.0)
            return found
        except Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                raise RuntimeError("a rank has failed: its message stands above") from None
    raise RuntimeError("the ranks did not end")


def _main(
    function: Callable[..., Any], rank: int, world_size: int, port: int, results: Any, args: tuple[Any, ...]
) -> None:
    pin(rank)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world_size,
        init_method=f"tcp://127.0.0.1:{port}",
        timeout=timedelta(seconds=300),
    )
    results.put((rank, function(rank, *args)))
    dist.barrier()
    dist.destroy_process_group()
