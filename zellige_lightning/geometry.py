"""The memory model's coefficients (paper, Sec. IV-B), measured on copies of the user's model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from zellige_lightning.batch import local_batch, materialize
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine
from zellige_lightning.engine.rehearsal import engine_alone
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.mixin import CoalescedAttentionMixin
from zellige_lightning.placement import Bucket, GlobalBatch, ParallelConfig, PlacementOption, Plan
from zellige_lightning.placement.plan import WHOLE
from zellige_lightning.planner import ModelGeometry
from zellige_lightning.trace import AttentionShape, small_batch
from zellige_lightning.trial import TrialStep, copy_module, layer_list

_FORWARD_ENDS = "zellige: forward ends"
_TOKENS = 512  # enough that tensors per token outweigh those per sequence, and attention other parts
_LEAST_SHARD = 64  # tokens of a rank when exchanges are measured
_MARGIN = 1.004  # predictions may be too high by that, never too low: what is missing ends a job


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one step above what was there before.

    Args:
        held: from forward to backward.
        extra: peak above that.
    """

    held: int
    extra: int


def measure_geometry(
    module: LightningModule,
    router: AttentionRouter,
    trial: TrialStep,
    shape: AttentionShape,
    save_attention: str = "none",
    configs: Iterable[ParallelConfig] = (),
) -> ModelGeometry:
    """Coefficients from the allocations of small steps of one and of two layers.

    Args:
        save_attention: as `EngineConfig`.
        configs: split configurations whose exchanges are measured; this rank runs its part alone.
    """
    assert isinstance(module, CoalescedAttentionMixin)
    layers = layer_list(module, list(module.attention_modules()))
    num_layers = len(layers) if layers is not None else 1
    depths = (1, 2) if layers is not None and num_layers > 1 else (1,)
    steps = [_Steps(copy_module(module, d), router, trial, save_attention == "all") for d in depths]
    parts = [_Parts.of(step) for step in steps]
    total, last = parts[0].deeper(parts[-1], num_layers), parts[-1]
    exchanges = [(config, _exchange_bytes(steps[-1], last, config)) for config in configs]
    return ModelGeometry(
        num_layers=num_layers,
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        element_bytes=shape.element_bytes,
        resident_bytes_per_token=max(1, math.ceil(_MARGIN * total.held_per_token)),
        transient_bytes_per_token=max(1, math.ceil(_MARGIN * last.extra_per_token)),
        bytes_per_sequence=math.ceil(total.per_sequence),
        split_bytes_per_token=saved_bytes_per_token(shape, num_layers) if save_attention == "anchors" else 0,
        step_bytes=math.ceil(total.per_step),
        exchange_bytes_per_token=tuple(exchanges),
    )


@dataclass(frozen=True)
class _Parts:
    """Memory of a step, taken apart: per local token, per sequence and per step."""

    held_per_token: float
    extra_per_token: float
    per_sequence: float
    per_step: float

    @classmethod
    def of(cls, steps: _Steps) -> _Parts:
        """From whole steps of two lengths, and of one length in two pieces."""
        short, long = steps.whole(_TOKENS), steps.whole(2 * _TOKENS)
        pieces = steps.whole(_TOKENS // 2, _TOKENS // 2)
        held, extra = (long.held - short.held) / _TOKENS, max(0.0, (long.extra - short.extra) / _TOKENS)
        sequence = max(0, pieces.held + pieces.extra - short.held - short.extra)
        rest = short.held + short.extra - (held + extra) * _TOKENS - sequence
        return cls(held, extra, sequence, max(0.0, rest))

    def deeper(self, two: _Parts, num_layers: int) -> _Parts:
        """Of a model of that many layers, when `self` is of one and `two` of two; what is transient is of one
        layer at a time."""

        def extend(one: float, more: float) -> float:
            return one + (more - one) * (num_layers - 1)

        return _Parts(
            extend(self.held_per_token, two.held_per_token),
            two.extra_per_token,
            max(0.0, extend(self.per_sequence, two.per_sequence)),
            max(0.0, extend(self.per_step, two.per_step)) if num_layers > 1 else two.per_step,
        )

    def whole_bytes(self, num_tokens: int) -> float:
        return (self.held_per_token + self.extra_per_token) * num_tokens + self.per_sequence + self.per_step


def _exchange_bytes(steps: _Steps, parts: _Parts, config: ParallelConfig) -> int:
    """What a rank takes beyond its tokens, per token of the sequence: the largest of two lengths and of the
    growth between them, which longer sequences will follow."""
    if config.is_whole:
        return 0
    lengths = [max(length, _LEAST_SHARD * config.degree) for length in (2 * _TOKENS, 4 * _TOKENS)]
    beyond = []
    for length in lengths:
        step = steps.split(config, *_coalesced(length, config))
        beyond.append(step.held + step.extra - parts.whole_bytes(length // config.degree))
    growth = (beyond[1] - beyond[0]) / max(1, lengths[1] - lengths[0])
    found = max(growth, *(size / length for size, length in zip(beyond, lengths, strict=True)))
    return max(0, math.ceil(_MARGIN * found))


def _coalesced(length: int, config: ParallelConfig) -> tuple[int, ...]:
    """Sequences that are split over heads only share a call, which then reorders their rows in buffers of its
    own; others run alone."""
    return (length // 2, length - length // 2) if config.is_packed else (length,)


class _Steps:
    """Small steps of one copy of the model on this rank alone."""

    def __init__(
        self, clone: LightningModule, router: AttentionRouter, trial: TrialStep, keep_all: bool
    ) -> None:
        self._clone, self._router, self._trial, self._keep_all = clone, router, trial, keep_all
        for parameter in clone.parameters():  # as in training, where gradients stay from step to step
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None

    def whole(self, *lengths: int) -> StepMemory:
        grids: list[tuple[int, int, int]] = [(1, 1, length) for length in lengths]
        buckets = [Bucket(f"memory-{i}", grid) for i, grid in enumerate(grids)]
        return self._run([PlacementOption(WHOLE, (0,))] * len(buckets), buckets)

    def split(self, config: ParallelConfig, *lengths: int) -> StepMemory:
        option = PlacementOption(config, tuple(range(config.degree)))
        buckets = [Bucket(f"memory-{i}", (1, 1, length)) for i, length in enumerate(lengths)]
        return self._run([option] * len(buckets), buckets)

    def _run(self, options: list[PlacementOption], buckets: list[Bucket]) -> StepMemory:
        batch = GlobalBatch.of(0, 0, ((bucket.name, bucket) for bucket in buckets))
        world = max(len(option.ranks) for option in options)
        plan = Plan(0, world, tuple(options), (0,) * world, (0,) * world)
        planned = materialize(batch, plan, 0, self._trial.source).to(self._clone.device)
        kept = frozenset(range(len(buckets))) if self._keep_all else frozenset()
        engine = engine_alone()
        with (
            engine_of_step(engine),
            self._router.answered_by(engine),
            engine.installed(planned.schedule, kept),
            torch.enable_grad(),
        ):
            held, peak = held_and_peak(
                lambda: self._trial.loss(self._clone, planned),
                lambda loss: loss.backward(),
                self._clone.device,
            )
        return StepMemory(held, max(0, peak - held))


def recomputes_attention(module: LightningModule, router: AttentionRouter, trial: TrialStep) -> bool:
    """Whether backward runs the attention again: activation checkpointing, which prices depend on."""
    clone, engine = copy_module(module, 1), CoalescedAttentionEngine()
    planned = local_batch(small_batch((1, 1, 16)), trial.source).to(clone.device)
    with engine_of_step(engine), router.answered_by(engine), engine.installed(planned.schedule):
        with torch.enable_grad():
            loss = trial.loss(clone, planned)
        once = engine.counters.kernel_calls["forward"]
        loss.backward()
    return engine.counters.kernel_calls["forward"] > once


def saved_bytes_per_token(shape: AttentionShape, num_layers: int) -> int:
    """Attention output and fp32 log-sum-exp that a kept sequence holds per local token, over all layers."""
    return num_layers * shape.num_heads * (shape.head_dim * shape.element_bytes + 4)


def held_and_peak(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], device: torch.device
) -> tuple[int, int]:
    """Bytes that `forward` leaves allocated, and the peak of both calls, above what was there before.

    On CUDA from the allocator. On CPU from the profiler's memory events, which also see what happens
    inside custom operators; trackers built on dispatch modes do not.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
        loss = forward()
        held = torch.cuda.memory_allocated(device) - base
        backward(loss)
        return held, torch.cuda.max_memory_allocated(device) - base
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would print a line for each start and stop
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        loss = forward()
        with torch.profiler.record_function(_FORWARD_ENDS):
            held_now = loss
        backward(held_now)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    forward_ends = next(e.start_ns() for e in events if e.name() == _FORWARD_ENDS)
    total = peak = held = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
        if event.start_ns() <= forward_ends:
            held = total
    return held, peak
