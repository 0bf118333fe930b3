"""Decoding in processes of its own: a file that hangs, crashes or leaks costs one process, not the run."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.buckets import BucketRules
from zellige_lightning.recipes.wan21.decision import Decision, decide, read_pixels, refused
from zellige_lightning.recipes.wan21.manifest import MediaItem, content_digest
from zellige_lightning.recipes.wan21.probe import Caps

_MEDIA_PER_PROCESS = 2000  # then a fresh one: decoders leak a little
_context = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Decoded:
    """`pixels` `[3, F, H, W]` uint8 and the sha256 of the file; None where only a decision was asked for."""

    item: MediaItem
    decision: Decision
    pixels: Tensor | None = None
    sha256: str | None = None


class Decoder:
    """A pool of processes. A context manager.

    Args:
        pixels: decode what is kept; otherwise only decide.
    """

    def __init__(self, num_workers: int, rules: BucketRules, caps: Caps, *, pixels: bool) -> None:
        if num_workers < 1:
            raise ConfigError(f"workers={num_workers}", fix="at least one process decodes")
        self._arguments = (rules, caps, pixels)
        self._caps, self._pixels = caps, pixels
        self._num_workers = num_workers
        self._workers: list[_Worker] = []

    def __enter__(self) -> Decoder:
        _context.set_forkserver_preload([__name__])  # imported once, where no fork server runs yet
        self._workers = [_Worker(self._arguments) for _ in range(self._num_workers)]
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def run(self, items: Iterable[MediaItem]) -> Iterator[Decoded]:
        """The results as they come. As many media are in memory as there are processes, and one."""
        waiting = iter(items)
        for worker in self._workers:
            worker.give(next(waiting, None))
        while busy := [worker for worker in self._workers if worker.item is not None]:
            worker = self._next_done(busy)
            item, result = worker.take(self._caps.max_seconds)
            if worker.served >= _MEDIA_PER_PROCESS or not worker.alive:
                worker.stop()
                self._workers[self._workers.index(worker)] = worker = _Worker(self._arguments)
            worker.give(next(waiting, None))  # it decodes the next while this one is used
            yield Decoded(item, *result)

    def _next_done(self, busy: list[_Worker]) -> _Worker:
        """A process with an answer, that has ended, or whose time is over."""
        deadline = min(worker.began + self._caps.max_seconds for worker in busy)
        ready = wait([worker.pipe for worker in busy], timeout=max(0.0, deadline - time.monotonic()))
        if ready:
            return next(worker for worker in busy if worker.pipe is ready[0])
        return min(busy, key=lambda worker: worker.began)


class _Worker:
    """One process and the medium that it has."""

    def __init__(self, arguments: tuple[BucketRules, Caps, bool]) -> None:
        self.pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()
        self.item: MediaItem | None = None
        self.began, self.served, self.alive, self._fresh = 0.0, 0, True, True

    def give(self, item: MediaItem | None) -> None:
        self.item = item
        if item is None:
            return
        if self._fresh:  # the time to import libraries is not the medium's
            self.pipe.recv_bytes()
            self._fresh = False
        self.began = time.monotonic()
        self.pipe.send_bytes(json.dumps(item.to_json()).encode())

    def take(self, max_seconds: float) -> tuple[MediaItem, tuple[Decision, Tensor | None, str | None]]:
        """The answer, or a decision that says why there is none."""
        item, self.item = self.item, None
        assert item is not None
        self.served += 1
        try:
            if not self.pipe.poll():
                self.alive = False
                return item, (
                    refused(item, DataError(f"decoding took more than {max_seconds:g} s")),
                    None,
                    None,
                )
            answer = json.loads(self.pipe.recv_bytes(1 << 24))
            decision = Decision(**answer["decision"])
            return item, (decision, self._pixels(answer["shape"]), answer["sha256"])
        except (EOFError, OSError):
            self.alive = False
            self._process.join(5.0)
            how = f"the decoder ended with code {self._process.exitcode}"
            return item, (refused(item, DataError(how)), None, None)

    def _pixels(self, shape: list[int] | None) -> Tensor | None:
        if shape is None:
            return None
        frames = torch.empty(shape, dtype=torch.uint8)  # [3, F, H, W]
        self.pipe.recv_bytes_into(memoryview(frames.numpy()).cast("B"))  # type: ignore[arg-type]
        return frames

    def stop(self) -> None:
        self.pipe.close()
        if not self.alive or self.item is not None:
            self._process.kill()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe: Connection, rules: BucketRules, caps: Caps, pixels: bool) -> None:
    """The life of a process: media in, decisions and pixels out, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    torch.set_num_threads(1)
    pipe.send_bytes(b"ready")
    while True:
        try:
            item = MediaItem(**json.loads(pipe.recv_bytes()))
        except (EOFError, OSError):  # the parent is done, or gone
            return
        answer, values = _answer(item, rules, caps, pixels)
        try:
            pipe.send_bytes(json.dumps(answer).encode())
            if values is not None:
                pipe.send_bytes(memoryview(values.numpy()).cast("B"))
        except OSError:  # the parent is gone
            return


def _answer(
    item: MediaItem, rules: BucketRules, caps: Caps, pixels: bool
) -> tuple[dict[str, Any], Tensor | None]:
    values, digest = None, None
    try:
        decision, found = decide(item, rules, caps)
        if pixels and decision.kept and found is not None:
            values = read_pixels(item, decision, found, rules, caps).contiguous()
            digest = content_digest(item)
    except Exception as error:  # whatever a hostile file does to a decoder is that file's fault
        decision, values = refused(item, error), None
    shape = None if values is None else list(values.shape)
    return {"decision": decision.to_json(), "shape": shape, "sha256": digest}, values
