"""The memory model's coefficients (paper, Sec. IV-B), measured on copies of the user's model."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from zellige_lightning.datamodule import local_batch
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.mixin import CoalescedAttentionMixin
from zellige_lightning.placement import GlobalBatch
from zellige_lightning.planner import ModelGeometry
from zellige_lightning.trace import AttentionShape, small_batch
from zellige_lightning.trial import TrialStep, copy_module, layer_list

_FORWARD_ENDS = "zellige: forward ends"
_MEMORY_TOKENS = 256  # enough that tensors per token outweigh tensors per sequence


def measure_geometry(
    module: LightningModule,
    router: AttentionRouter,
    trial: TrialStep,
    shape: AttentionShape,
    save_attention: str = "none",
) -> ModelGeometry:
    """Coefficients from the allocations of one step of one and of two layers.

    Args:
        save_attention: as `EngineConfig`.
    """
    assert isinstance(module, CoalescedAttentionMixin)
    layers = layer_list(module, list(module.attention_modules()))
    num_layers = len(layers) if layers is not None else 1
    batch = small_batch((1, 1, _MEMORY_TOKENS))
    depths = (1, 2) if layers is not None and num_layers > 1 else (1,)
    keep_all = save_attention == "all"
    measured = [_step_memory(copy_module(module, depth), router, batch, trial, keep_all) for depth in depths]
    (resident, peak), last = measured[0], measured[-1]
    per_layer = last[0] - resident if len(measured) > 1 else 0
    total = resident + per_layer * (num_layers - 1)
    return ModelGeometry(
        num_layers=num_layers,
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        element_bytes=shape.element_bytes,
        resident_bytes_per_token=max(1, total // _MEMORY_TOKENS),
        transient_bytes_per_token=max(1, max(peak, last[1]) // _MEMORY_TOKENS),
        bytes_per_sequence=0,
        split_bytes_per_token=saved_bytes_per_token(shape, num_layers) if save_attention == "anchors" else 0,
    )


def saved_bytes_per_token(shape: AttentionShape, num_layers: int) -> int:
    """Attention output and fp32 log-sum-exp that a kept sequence holds per local token, over all layers."""
    return num_layers * shape.num_heads * (shape.head_dim * shape.element_bytes + 4)


def _step_memory(
    clone: LightningModule, router: AttentionRouter, batch: GlobalBatch, trial: TrialStep, keep_all: bool
) -> tuple[int, int]:
    """(bytes held from forward to backward, peak above them) of one step, gradients not counted."""
    planned = local_batch(batch, trial.source).to(clone.device)
    gradients = sum(p.numel() * p.element_size() for p in clone.parameters() if p.requires_grad)
    engine = CoalescedAttentionEngine()
    kept = frozenset(range(len(batch.sequences))) if keep_all else frozenset()
    answered = router.answered_by(engine), engine.installed(planned.schedule, kept), torch.enable_grad()
    with engine_of_step(engine), answered[0], answered[1], answered[2]:
        resident, peak = held_and_peak(
            lambda: trial.loss(clone, planned), lambda loss: loss.backward(), clone.device
        )
    return resident, max(0, peak - resident - gradients)


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
