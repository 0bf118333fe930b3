"""Single steps of copies of the model, timed on all ranks together: what prices are made of."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule

from zellige_lightning.agreement import Agreement
from zellige_lightning.batch import RankBatch, materialize
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine
from zellige_lightning.engine.rehearsal import rehearsing
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.engine.saving import SavePolicy
from zellige_lightning.mixin import require_mixin
from zellige_lightning.placement import Bucket, GlobalBatch, PlacementOption, Plan, whole
from zellige_lightning.placement.plan import Filling
from zellige_lightning.trial import TrialStep, copy_module, layer_list

Fill = Callable[[Plan, GlobalBatch], tuple[Filling, ...]]

_REDUCED_VALUES = 1 << 26  # gradients that are timed; more take proportionally longer
_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")


@dataclass(frozen=True)
class Timing:
    """One run as all ranks saw it: microseconds of wall clock and of processor time, by rank."""

    wall_us: tuple[float, ...]
    cpu_us: tuple[float, ...]

    def by(self, clock: str) -> tuple[float, ...]:
        """The times of `wall` or `cpu`."""
        return self.wall_us if clock == "wall" else self.cpu_us


class Measurement:
    """Times steps of copies of the model. All methods that run steps are collectives of the world.

    Args:
        module: the user's module; never run itself.
        trial: runs steps of its copies.
        all_layers_up_to: as `ProfilerConfig`.
        saving: whose attention is kept, as in training; None for nobody's.

    Attributes:
        elapsed_s: rank 0's time since the start, known to all ranks alike, as of the last run.
    """

    def __init__(
        self,
        module: LightningModule,
        engine: CoalescedAttentionEngine,
        router: AttentionRouter,
        agreement: Agreement,
        trial: TrialStep,
        all_layers_up_to: int = 4,
        saving: SavePolicy | None = None,
    ) -> None:
        # What `auto` keeps depends on the memory that a plan leaves: without is the price to count on.
        self._saving = saving if saving is not None and saving.mode != "auto" else SavePolicy()
        self._engine, self._router, self._agreement = engine, router, agreement
        self._trial, self._module = trial, module
        layers = layer_list(module, list(require_mixin(module).attention_modules()))
        self._num_layers = len(layers) if layers is not None else 1
        deep = layers is not None and self._num_layers > all_layers_up_to
        self._clones = [copy_module(module, depth) for depth in ((1, 2) if deep else (None,))]
        self._began, self.elapsed_s = time.perf_counter(), 0.0

    @property
    def rank(self) -> int:
        return self._agreement.rank

    @property
    def world_size(self) -> int:
        return self._agreement.world_size

    def share(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        return self._agreement.share(text)

    def plan(
        self, options: list[PlacementOption], buckets: list[Bucket], fill: Fill | None = None
    ) -> RankBatch:
        """This rank's part of a batch of synthetic sequences, `options[i]` placing one of `buckets[i]`.

        Args:
            fill: which whole sequences run in which pause; without it all run in the first.
        """
        batch = GlobalBatch.of(0, 0, ((f"profile-{i}", bucket) for i, bucket in enumerate(buckets)))
        nothing = (0,) * self.world_size
        plan = Plan(0, self.world_size, tuple(options), nothing, nothing)
        if fill is not None:
            plan = replace(plan, filling=fill(plan, batch))
        return materialize(batch, plan, self._agreement.rank, self._trial.source)

    def fits(self, batch: RankBatch) -> bool:
        """Whether all ranks have the memory for such a step: each runs it alone once, with exchanges that
        move nothing, so that a rank that runs out of memory keeps nobody waiting. Warms up as well.

        Raises:
            ZelligeError: any other failure of a rank, on all.
        """

        def alone() -> bool:
            try:
                with rehearsing(self._engine):
                    for clone in self._clones:
                        self._step(clone, batch.to(clone.device))
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                return False
            return True

        fitting = self._agreement.together(alone)
        rows = self._agreement.gather([int(fitting), self._elapsed_us()])
        self.elapsed_s = rows[0][1] / 1e6
        if all(flag for flag, _ in rows):
            return True
        self._let_go()
        return False

    def step(self, batch: RankBatch) -> Timing:
        """One step of the whole model; of a deep one, extrapolated from one and two layers."""
        runs = []
        for clone in self._clones:
            local = batch.to(clone.device)
            runs.append(self._timed(lambda c=clone, b=local: self._step(c, b), clone.device))  # type: ignore[misc]
        return runs[0] if len(runs) == 1 else _of_depth(runs[0], runs[1], self._num_layers)

    def all_reduce_us(self, clock: str = "wall", repeats: int = 3) -> float:
        """Median time to reduce all gradients, which every step pays whatever its placement."""
        if self.world_size == 1:
            return 0.0
        module = self._module
        size = sum(p.numel() for p in module.parameters() if p.requires_grad)
        gradients = torch.zeros(min(size, _REDUCED_VALUES), device=module.device)
        reduce = lambda: torch.distributed.all_reduce(gradients)  # noqa: E731
        timings = [self._timed(reduce, module.device) for _ in range(1 + repeats)][1:]
        return median(max(timing.by(clock)) for timing in timings) * size / max(1, len(gradients))

    def _step(self, clone: LightningModule, batch: RankBatch) -> None:
        with self._answering(batch), torch.enable_grad():
            self._trial.loss(clone, batch).backward()
        for parameter in clone.parameters():
            parameter.grad = None

    @contextmanager
    def _answering(self, batch: RankBatch) -> Iterator[None]:
        plan, lengths = batch.plan, [s.num_tokens for s in batch.global_batch.sequences]
        self._engine.install(batch.schedule, self._saving.choose(plan.options, lengths, plan.memory_mib))
        try:
            with self._router.answered_by(self._engine), engine_of_step(self._engine):
                yield
        finally:
            self._engine.forget()

    def _timed(self, work: Callable[[], Any], device: torch.device) -> Timing:
        self._agreement.gather([0])  # start together
        began = time.perf_counter(), time.process_time()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        wall, cpu = time.perf_counter() - began[0], time.process_time() - began[1]
        rows = self._agreement.gather([int(1e6 * wall), int(1e6 * cpu), self._elapsed_us()])
        self.elapsed_s = rows[0][2] / 1e6
        return Timing(tuple(float(row[0]) for row in rows), tuple(float(row[1]) for row in rows))

    def _elapsed_us(self) -> int:
        return int(1e6 * (time.perf_counter() - self._began))

    def _let_go(self) -> None:
        """Free what a failed step held, so that the next one finds it."""
        for clone in self._clones:
            for parameter in clone.parameters():
                parameter.grad = None
        gc.collect()
        if self._module.device.type == "cuda":
            torch.cuda.empty_cache()


def ran_out_of_memory(error: BaseException) -> bool:
    """Of the device, or of the host: torch reports the latter as a plain `RuntimeError`."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _NO_MEMORY)


def _of_depth(one: Timing, two: Timing, num_layers: int) -> Timing:
    def deep(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(x + max(0.0, y - x) * (num_layers - 1) for x, y in zip(a, b, strict=True))

    return Timing(deep(one.wall_us, two.wall_us), deep(one.cpu_us, two.cpu_us))


def everywhere(world_size: int, copies: int) -> list[PlacementOption]:
    """`copies` whole sequences on every rank."""
    return [whole(rank) for rank in range(world_size)] * copies
