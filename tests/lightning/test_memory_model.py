"""The memory model against what steps really take, and the measurement against a buffer that it must see."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from zellige_lightning.batch import materialize
from zellige_lightning.engine import AttentionRouter
from zellige_lightning.engine.rehearsal import engine_alone
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.geometry import held_and_peak, measure_geometry
from zellige_lightning.memory_budget import MemoryBudget, memory_budget
from zellige_lightning.placement import Bucket, GlobalBatch, ParallelConfig, PlacementOption, Plan, whole
from zellige_lightning.planner import MemoryModel, legal_configs
from zellige_lightning.recipes.wan21.config import WanConfig
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.sources import FieldSpec, SyntheticSource
from zellige_lightning.trace import attention_shape
from zellige_lightning.trial import TrialStep, copy_module

CPU, MIB = torch.device("cpu"), 1 << 20
CONFIG = WanConfig(dim=32, ffn_dim=96, num_heads=4, num_layers=3, text_dim=16, text_len=8, freq_dim=32)
WORLD = 4
CONFIGS = tuple(c for c in legal_configs(4, WORLD) if c.degree in (1, 2, 4))
Rows = list[tuple[ParallelConfig, int]]


@torch.library.custom_op("zellige_test::scratch", mutates_args=())
def scratch(x: Tensor, size: int) -> Tensor:
    """Uses a buffer of `size` bytes that is gone when it returns."""
    buffer = x.new_zeros(size // x.element_size())
    return x + buffer[:1]


def test_a_buffer_inside_a_custom_operator_is_seen() -> None:
    weight = torch.ones(4, requires_grad=True)

    def forward(size: int) -> Tensor:
        return (weight * scratch(torch.ones(4), size)).sum()

    def peak(size: int) -> int:
        return held_and_peak(lambda: forward(size), lambda loss: loss.backward(), CPU)[1]

    assert 8 * MIB - 64 <= peak(8 * MIB) - peak(8) < 8 * MIB + 4096


class Job:
    """A model, and single-rank parts of steps of it."""

    def __init__(self, checkpointing: bool) -> None:
        torch.manual_seed(0)
        self.module = WanModule(CONFIG, activation_checkpointing=checkpointing)
        self.module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        self.router, self.engine = AttentionRouter(), engine_alone()
        self.module.route_attention(self.router)
        fields = {"latents": FieldSpec((64,), torch.float32)}, {"text": FieldSpec((8, 16), torch.float32)}
        self.trial = TrialStep(Precision(), SyntheticSource(*fields))
        shape = attention_shape(copy_module(self.module, 1), self.router, self.trial)
        self.model = MemoryModel(
            measure_geometry(self.module, self.router, self.trial, shape, configs=CONFIGS)
        )
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def peak(self, rows: Rows) -> int:
        """Measured on rank 0, which takes part in all of them."""
        options = [whole(0) if c.is_whole else PlacementOption(c, tuple(range(c.degree))) for c, _ in rows]
        batch = GlobalBatch.of(0, 0, ((f"{i}", Bucket(f"b{n}", (1, 1, n))) for i, (_, n) in enumerate(rows)))
        nothing = (0,) * WORLD
        planned = materialize(batch, Plan(0, WORLD, tuple(options), nothing, nothing), 0, self.trial.source)
        engine = self.engine
        with engine_of_step(engine), self.router.answered_by(engine), engine.installed(planned.schedule):
            return held_and_peak(
                lambda: self.trial.loss(self.module, planned), lambda loss: loss.backward(), CPU
            )[1]

    def predicted(self, rows: Rows) -> int:
        needs = (self.model.sequence_bytes(tokens, config) for config, tokens in rows)
        return self.model.geometry.step_bytes + sum(needs)


ONE, GATHER, ULYSSES, RING = (ParallelConfig(*c) for c in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)))
PAIRS: list[Rows] = [
    [(ONE, 600)],
    [(ONE, 64)] * 9,
    [(GATHER, 2000)],
    [(ULYSSES, 700)] * 3 + [(ONE, 64)] * 4,
    [(RING, 1600), (ONE, 500)],
    [(GATHER, 1200), (ULYSSES, 900), (RING, 1500), (ONE, 300)],
]
FOURS: list[Rows] = [
    [(ParallelConfig(2, 2, 1), 2000), (ONE, 500)],
    [(ParallelConfig(4, 1, 1), 1600), (ParallelConfig(1, 2, 2), 1000)],
    [(ParallelConfig(2, 1, 2), 1400), (ULYSSES, 700)],
]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_peaks_are_predicted_and_never_too_low(checkpointing: bool) -> None:
    job = Job(checkpointing)
    found = [(job.predicted(rows) / job.peak(rows) - 1.0, rows) for rows in (*PAIRS, *FOURS)]
    assert min(found)[0] > -0.01, f"what is missing ends a job: {min(found)}"
    if not checkpointing:  # with it little is held, and whose buffers are the peak depends on the mix
        errors = [abs(error) for error, _ in found[: len(PAIRS)]]
        assert sum(errors) / len(errors) < 0.05
        assert max(found)[0] < 0.25, f"buffers of several axes: {max(found)}"


def test_the_budget_names_its_parts_and_adds_up() -> None:
    budget = MemoryBudget(
        usable=10 << 30,
        elsewhere=1 << 30,
        parameters=1 << 30,
        gradients=1 << 30,
        optimizer=2 << 30,
        step=1 << 29,
    )
    assert budget.cap_mib == (10 << 10) - (4 << 10) - 512
    for part in ("usable 10.000", "parameters 1.000", "optimizer 2.000", "step 0.500", "M_cap 5.500"):
        assert part in str(budget)
    module = WanModule(CONFIG)
    own = memory_budget(module, CPU, num_local_ranks=2, step_bytes=5)
    size = sum(p.numel() * 4 for p in module.parameters())
    assert (own.gradients, own.optimizer, own.step) == (size, 2 * size, 5)
    assert own.parameters >= size
