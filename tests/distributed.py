"""Runs a function on N processes that form a gloo world, in a fraction of a second.

A fork server imports torch and Lightning once; every process is forked from it. Ranks meet on a loopback
port that is reserved for them, told through environment variables as torchrun would, so that Lightning starts
nothing.
"""

from __future__ import annotations

import fcntl
import itertools
import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_turns = itertools.count()
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "lightning.pytorch",
        "zellige_lightning.strategy",
        "zellige_lightning.planner.paper",
    ]
)


@dataclass
class Outcome:
    """How one rank ended. `error` is what it raised, as (type name, text); `log` is its standard error."""

    rank: int
    value: Any = None
    error: tuple[str, str] | None = None
    exit_code: int | None = None
    trace: str = ""


def run_distributed(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, group: bool = True
) -> list[Any]:
    """`function(rank, *args)` on every rank; the results by rank.

    Args:
        function: a module-level function.
        group: make the default process group first. Lightning makes its own.

    Raises:
        AssertionError: a rank raised, died, or did not end in time.
    """
    outcomes = run_outcomes(function, world_size, *args, timeout_s=timeout_s, group=group)
    failed = [o for o in outcomes if o.error or o.exit_code]
    assert not failed, "\n".join(f"rank {o.rank} (exit code {o.exit_code}):\n{o.trace}" for o in failed)
    return [o.value for o in outcomes]


def run_outcomes(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0, group: bool = True
) -> list[Outcome]:
    """Like `run_distributed`, but failing ranks are part of the result."""
    packed = pickle.dumps(args)  # plainly: torch's own way for tensors takes a file descriptor each
    with tempfile.TemporaryDirectory() as folder, reserved_port() as port:
        pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            _context.Process(
                target=_rank_main,
                args=(function, rank, world_size, port, folder, group, pipes[rank][1], packed),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process, (_, child) in zip(processes, pipes, strict=True):
            process.start()
            child.close()
        # All are heard before any is waited for: a rank leaves only when all have come to their end.
        outcomes = [_hear(rank, parent, timeout_s) for rank, (parent, _) in enumerate(pipes)]
        for outcome, process in zip(outcomes, processes, strict=True):
            outcome.exit_code = _exit_code(process)
        return outcomes


def _hear(rank: int, pipe: Any, timeout_s: float) -> Outcome:
    outcome = Outcome(rank)
    try:
        if pipe.poll(timeout_s):
            outcome.value, outcome.error, outcome.trace = pickle.loads(pipe.recv_bytes())
        else:
            outcome.error = ("TimeoutError", f"rank {rank} did not end within {timeout_s} s")
            outcome.trace = outcome.error[1]
    except EOFError:
        outcome.trace = "the process died without a result"
    return outcome


def _exit_code(process: Any) -> int | None:
    process.join(10.0)
    if process.is_alive():
        process.kill()
        process.join()
    code: int | None = process.exitcode
    return code


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    group: bool,
    pipe: Any,
    packed: bytes,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="tests",
        OMP_NUM_THREADS="1",
        XDG_CACHE_HOME=folder,
    )
    value, error, trace = None, None, ""
    try:
        if group:
            dist.init_process_group(
                "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60), init_method="env://"
            )
        value = function(rank, *pickle.loads(packed))
    except BaseException as caught:
        error, trace = (type(caught).__name__, str(caught)), traceback.format_exc()
    pipe.send_bytes(pickle.dumps((value, error, trace)))
    pipe.close()
    if group and error is None:
        dist.barrier()  # the store's host must not leave while others still talk to it
        dist.destroy_process_group()


_PORTS = range(21000, 21256)  # below those that systems give to whoever asks for any port


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port on which nobody listens and that no other run of these tests takes before the block ends.

    A port that is only looked up (bind to 0, close) may be given away before the first rank listens on it.
    """
    locks = Path(tempfile.gettempdir()) / f"zellige-test-ports-{os.getuid()}"
    locks.mkdir(exist_ok=True)
    first = next(_turns) + os.getpid()
    for i in range(len(_PORTS)):
        port = _PORTS[(first + i) % len(_PORTS)]
        with open(locks / str(port), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _listen_once(port)
            except OSError:  # another run's, or a stranger's
                continue
            yield port
            return
    raise AssertionError(f"no free port in {_PORTS}")


def _listen_once(port: int) -> None:
    """Raises: OSError where somebody else listens."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of earlier tests may linger
        probe.bind(("", port))
        probe.listen()
