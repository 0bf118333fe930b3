"""A compiled layer over any number of plans: at most two graphs, equal results, and no rank that hangs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.distributed import run_distributed
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine, ProcessGroupCache, checkpoint
from zellige_lightning.placement import ParallelConfig, PlacementOption, RankSchedule, build_schedule, whole
from zellige_lightning.placement.schedule import padded

HEADS = 4
BOTH = (0, 1)
SPLITS = [PlacementOption(ParallelConfig(*c), BOTH) for c in ((1, 2, 1), (2, 1, 1), (1, 1, 2))]
# Rank 1 holds 0 tokens, 1 token, a shard of one token, and more: (options, lengths) of each plan.
PLANS: list[tuple[list[PlacementOption], list[int]]] = [
    ([SPLITS[0], whole(0), whole(1)], [40, 9, 7]),
    ([whole(0), whole(0)], [12, 5]),
    ([whole(0), whole(1)], [12, 1]),
    ([SPLITS[1]], [3]),
    ([SPLITS[2], whole(0)], [1, 6]),
    ([SPLITS[2], SPLITS[0], SPLITS[1], whole(1), whole(0)], [33, 20, 17, 8, 4]),
    ([whole(1)], [64]),
]


class Layer(nn.Module):
    """A layer whose self-attention is an attribute, which the compiler can trace."""

    attention = staticmethod(F.scaled_dot_product_attention)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(0, 1)[None] for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        return x + torch.tanh(self.out(self.attention(q, k, v)[0].transpose(0, 1).flatten(1)))


class Checkpointed(nn.Module):
    """What the compiler is to enclose."""

    def __init__(self, layer: Layer, engine: CoalescedAttentionEngine) -> None:
        super().__init__()
        self.layer, self.engine = layer, engine

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, engine=self.engine)


def run(rank: int, backend: str, checkpointing: bool, keep: bool) -> dict[str, Any]:
    groups = ProcessGroupCache(timedelta(seconds=120))
    groups.prepare([BOTH])
    engine, router = CoalescedAttentionEngine(groups, keep_when_compiled=keep), AttentionRouter()
    torch.manual_seed(0)
    layer = Layer()
    router.attach("layer", layer)
    router.attention = engine
    counter = CompileCounterWithBackend(backend)
    region = Checkpointed(layer, engine) if checkpointing else layer
    compiled = torch.compile(region, backend=counter, fullgraph=True, dynamic=True)
    errors, forwards = [], []
    for options, lengths in PLANS:
        schedule = padded(build_schedule(options, lengths, rank, 2))
        x = torch.randn(schedule.num_tokens, 16)
        reference = _gradients(layer, layer, x, engine, schedule)
        engine.counters.reset()
        got = _gradients(compiled, layer, x, engine, schedule)
        forwards.append(engine.counters.kernel_calls["forward"])
        errors += [
            float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
            for a, b in zip(got, reference, strict=True)
        ]
    return {"graphs": counter.frame_count, "error": max(errors), "forwards": sum(forwards)}


def _gradients(
    function: Any, layer: Layer, x: Tensor, engine: CoalescedAttentionEngine, schedule: RankSchedule
) -> list[Tensor]:
    engine.install(schedule)
    layer.zero_grad()
    x = x.clone().requires_grad_()
    function(x).square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize(
    ("backend", "checkpointing"),
    [
        ("aot_eager", False),
        ("aot_eager", True),
        ("inductor", False),
        pytest.param("inductor", True, marks=pytest.mark.slow),
    ],
)
def test_two_graphs_serve_every_plan(backend: str, checkpointing: bool) -> None:
    ranks = run_distributed(run, 2, backend, checkpointing, False, timeout_s=400)
    assert max(rank["error"] for rank in ranks) <= 1e-4
    assert max(rank["graphs"] for rank in ranks) <= 2


def test_compiled_checkpointing_can_keep_attention() -> None:
    kept = run_distributed(run, 2, "aot_eager", True, True, timeout_s=400)
    repeated = run_distributed(run, 2, "aot_eager", True, False, timeout_s=400)
    for mine, other in zip(kept, repeated, strict=True):
        assert mine["error"] <= 1e-4
        assert 2 * mine["forwards"] == other["forwards"]
