"""Training steps of the whole model on a packed mix of images and a short video: time, MFU by the exact count
of operations, and peak memory against the memory model with the geometry that the profiler measures."""

from __future__ import annotations

import statistics
from contextlib import AbstractContextManager
from typing import Any

import torch
from gpu_common import Setup, elapsed_ms, free_bytes, rounded
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision

from zellige_lightning.batch import RankBatch, local_batch
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.geometry import held_and_peak, measure_geometry
from zellige_lightning.placement import Bucket, GlobalBatch, ParallelConfig
from zellige_lightning.planner import MemoryModel
from zellige_lightning.recipes.wan21.flops import executed_flops, model_flops
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.simulator.constants import image
from zellige_lightning.sources import FieldSpec, SyntheticSource
from zellige_lightning.trace import attention_shape
from zellige_lightning.trial import TrialStep, copy_module

FP32_STATES = 16  # bytes per parameter: weight, gradient and two moments, all fp32 (bf16-mixed)
SHORT, SHORTER = Bucket("video-480p-5s", (21, 30, 52)), Bucket("video-480p-1s", (5, 30, 52))


def mixes(setup: Setup) -> list[list[Bucket]]:
    """From small to large: 14,000 and 68,000 tokens."""
    if setup.tiny:
        return [[Bucket("video", (3, 4, 4)), *[Bucket("image", (1, 4, 4))] * 3]]
    small, medium, large, largest = map(image, ("256p", "480p", "720p", "1080p"))
    return [
        [SHORTER, *[medium] * 3, *[small] * 6],
        [SHORT, largest, *[large] * 3, *[medium] * 8, *[small] * 16],
    ]


class StepRig:
    """The recipe's module, its optimizer and an engine of one rank.

    The precision is the recipe's, bf16-mixed, where its 16 bytes per parameter take less than 60 percent of
    the memory; otherwise weights, gradients and moments are all bf16.
    """

    def __init__(self, setup: Setup) -> None:
        torch.manual_seed(0)
        self.setup, device = setup, setup.device
        with device:  # drawing 1.4 billion weights on the host would take longer than the steps
            self.module = WanModule(setup.config, activation_checkpointing=True)
        setattr(self.module, "log", lambda *args, **kwargs: None)  # noqa: B010 - there is no trainer
        size = sum(p.numel() for p in self.module.parameters())
        mixed = setup.tiny or FP32_STATES * size < 0.6 * free_bytes(device)
        self.precision = "bf16-mixed" if mixed else "bf16-true"
        plugin: Precision = MixedPrecision("bf16-mixed", device.type) if mixed else HalfPrecision("bf16-true")
        self.module.to(device, None if mixed else torch.bfloat16)
        self.optimizer: torch.optim.Optimizer = self.module.configure_optimizers()["optimizer"]
        text = (setup.config.text_len, setup.config.text_dim)
        fields = FieldSpec((64,), torch.float32), FieldSpec(text, torch.float32)
        self.trial = TrialStep(plugin, SyntheticSource({"latents": fields[0]}, {"text": fields[1]}))
        self.engine, self.router = CoalescedAttentionEngine(), AttentionRouter()
        self.module.route_attention(self.router)

    def batch(self, buckets: list[Bucket]) -> RankBatch:
        samples = [(f"{i}-{bucket.name}", bucket) for i, bucket in enumerate(buckets)]
        return local_batch(GlobalBatch.of(0, 0, samples), self.trial.source).to(self.setup.device)

    def memory_model(self) -> MemoryModel:
        """With the geometry that the profiler would measure."""
        shape = attention_shape(copy_module(self.module, 1), self.router, self.trial)
        return MemoryModel(measure_geometry(self.module, self.router, self.trial, shape))

    def attending(self, batch: RankBatch) -> AbstractContextManager[None]:
        self.engine.install(batch.schedule)
        return self.router.answered_by(self.engine)

    def step(self, batch: RankBatch) -> None:
        """Loss, gradients, update. Gradients stay allocated, as the memory model assumes."""
        with self.attending(batch), engine_of_step(self.engine):
            self.trial.loss(self.module, batch).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def peak_bytes(self, batch: RankBatch) -> int:
        """Peak of forward and backward above weights, gradients and optimizer states."""
        with self.attending(batch), engine_of_step(self.engine):
            _, peak = held_and_peak(
                lambda: self.trial.loss(self.module, batch),
                lambda loss: loss.backward(),
                self.setup.device,
            )
        self.optimizer.zero_grad(set_to_none=False)
        return peak


def check(setup: Setup) -> None:
    """A row for each mix that fits and ends in time."""
    rig = StepRig(setup)
    memory = rig.memory_model()
    geometry = memory.geometry
    setup.record(
        {
            "precision": rig.precision,
            "resident_bytes_per_token": geometry.resident_bytes_per_token,
            "transient_bytes_per_token": geometry.transient_bytes_per_token,
        }
    )
    s_per_flop = 0.0
    for buckets in mixes(setup):
        flops = sum(executed_flops(setup.config, b.num_tokens) for b in buckets)
        if 3 * s_per_flop * flops > setup.remaining_s:
            setup.record({"mix": name_of(buckets), "left_out": f"{setup.remaining_s:.0f} s are left"})
            return
        try:
            row = measured(rig, buckets, memory)
        except torch.OutOfMemoryError:
            setup.record({"mix": name_of(buckets), "left_out": "out of memory"})
            return
        setup.record(row)
        s_per_flop = row["step_ms"] / 1e3 / flops


def measured(rig: StepRig, buckets: list[Bucket], memory: MemoryModel) -> dict[str, Any]:
    """Medians of steps after one that warms up and allocates states, and the peak of one more."""
    setup, batch = rig.setup, rig.batch(buckets)
    first = elapsed_ms(lambda: rig.step(batch), setup.device)
    repeats = max(1, min(setup.repeats, int(0.5 * 1e3 * setup.remaining_s / first) - 1))
    times = [elapsed_ms(lambda: rig.step(batch), setup.device) for _ in range(repeats)]
    noise_ms = elapsed_ms(
        lambda: rig.module.flow.inputs(
            0, batch.sequences, [s.tokens for s in batch.segments], batch.tokens["latents"]
        ),
        setup.device,
    )
    lengths, ms = [b.num_tokens for b in buckets], statistics.median(times)
    peak = rig.peak_bytes(batch)
    predicted = sum(memory.memory_mib(length, ParallelConfig()) for length in lengths)
    return {
        "mix": name_of(buckets),
        "tokens": sum(lengths),
        "repeats": repeats,
        "step_ms": rounded(ms),
        "noise_ms": rounded(noise_ms),
        "model_tflop": rounded(model_flops(setup.config, lengths) / 1e12),
        "model_tflops": rounded(model_flops(setup.config, lengths) / ms / 1e9),
        "executed_tflops": rounded(sum(executed_flops(setup.config, n) for n in lengths) / ms / 1e9),
        "peak_mib": round(peak / 2**20),
        "predicted_mib": predicted,
        "predicted_over_peak": rounded(predicted * 2**20 / peak, 3),
    }


def name_of(buckets: list[Bucket]) -> str:
    names = [b.name for b in buckets]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
