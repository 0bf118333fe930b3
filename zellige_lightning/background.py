"""A thread that runs jobs in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Background:
    """One daemon thread that runs jobs in order. Daemonic, so that a job stuck in a dead collective cannot
    keep the process alive."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def close(self, timeout_s: float | None) -> None:
        """Let the jobs that were handed in finish, then end the thread."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            future, job = item
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
