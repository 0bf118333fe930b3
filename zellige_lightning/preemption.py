"""SIGTERM to any rank stops all ranks before the same optimizer step.

A collective inside a signal handler interleaves with the others and hangs, so the handler only sets a
flag. The flag travels with the agreement that precedes each step.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException


class Preemption:
    """Whether this rank was asked to stop, and whether all ranks know that one was.

    Attributes:
        requested: a signal arrived on this rank.
        agreed: some rank reported one; the same on all ranks between two agreements.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.requested = self.agreed = False
        self._trainer = trainer

    def watch(self) -> None:
        """Take over SIGTERM from Lightning, which puts its own handlers back after the run. Signals reach
        the main thread only, and a single rank needs no agreement."""
        if self._trainer.world_size > 1 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, signum: int, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if not self.requested and launcher is not None:
            launcher.kill(signal.SIGTERM)
        self.requested = True
        before = self._trainer._signal_connector._original_handlers.get(signal.SIGTERM)
        if callable(before):
            before(signum, frame)

    def stop_if_agreed(self) -> None:
        """To be called between two optimizer steps, so that no gradient is lost.

        Raises:
            SIGTERMException: on all ranks, if they have agreed.
        """
        if self.agreed:
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException
