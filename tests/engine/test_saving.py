"""Attention that is kept through activation checkpointing: fewer forwards and exchanges, equal gradients."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import run_distributed
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine, ProcessGroupCache, checkpoint
from zellige_lightning.engine.saving import SavePolicy, divide
from zellige_lightning.errors import ConfigError, EngineError
from zellige_lightning.placement import ParallelConfig, PlacementOption, build_schedule, whole

HEADS, LAYERS = 4, 2
ULYSSES, RING = ParallelConfig(1, 2, 1), ParallelConfig(1, 1, 2)
OPTIONS = [PlacementOption(ULYSSES, (0, 1)), whole(0), PlacementOption(RING, (0, 1)), whole(1), whole(0)]
OPTIONS += [PlacementOption(ULYSSES, (0, 1))]
LENGTHS = [40, 9, 33, 7, 12, 21]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(0, 1)[None] for t in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)
        return x + torch.tanh(self.out(attended))


def train(rank: int, kept: frozenset[int], checkpointing: bool) -> dict[str, Any]:
    groups = ProcessGroupCache(timedelta(seconds=30))
    groups.prepare([(0, 1)])
    engine, router = CoalescedAttentionEngine(groups), AttentionRouter()
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer() for _ in range(LAYERS)).double()
    for i, layer in enumerate(layers):
        router.attach(str(i), layer)
    router.attention = engine
    schedule = build_schedule(OPTIONS, LENGTHS, rank, 2)
    engine.install(schedule, kept)
    x = torch.randn(schedule.num_tokens, 16, dtype=torch.float64, requires_grad=True)
    y = x
    for layer in layers:
        y = checkpoint(layer, y, engine=engine) if checkpointing else layer(y)
    y.square().sum().backward()
    counters = engine.counters
    gradients = [p.grad.numpy() for p in layers.parameters()] + [x.grad.numpy()]
    return {
        "forwards": counters.kernel_calls["forward"],
        "exchanges": sum(counters.exchanges.values()),
        "gradients": gradients,
    }


@pytest.fixture(scope="module")
def without_checkpoint() -> list[dict[str, Any]]:
    return run_distributed(train, 2, frozenset(), False)


@pytest.mark.parametrize("mode", ["none", "anchors", "all", "mixed"])
def test_kept_attention_is_not_repeated(mode: str, without_checkpoint: list[dict[str, Any]]) -> None:
    kept = frozenset({0, 1, 3}) if mode == "mixed" else SavePolicy(mode).choose(OPTIONS, LENGTHS, [0, 0])
    ranks = run_distributed(train, 2, kept, True)
    for mine, plain in zip(ranks, without_checkpoint, strict=True):
        for a, b in zip(mine["gradients"], plain["gradients"], strict=True):
            assert abs(a - b).max() <= 1e-12 * abs(b).max()
        more_forwards = mine["forwards"] - plain["forwards"]
        more_exchanges = mine["exchanges"] - plain["exchanges"]
        if mode == "none":  # the second forward of every layer
            assert more_forwards == plain["forwards"] and more_exchanges > 0
        elif mode == "anchors":  # only the whole pack runs again
            assert more_forwards == LAYERS and more_exchanges == 0
        elif mode == "all":
            assert more_forwards == more_exchanges == 0
        else:
            assert more_forwards > 0 and more_exchanges > 0


def test_auto_keeps_the_longest_that_fit_on_all_their_ranks() -> None:
    policy = SavePolicy("auto", bytes_per_token=2**20, cap_mib=100)
    assert policy.choose(OPTIONS, LENGTHS, [100, 100]) == frozenset()
    assert policy.choose(OPTIONS, LENGTHS, [100, 0]) == {3}, "rank 0 has no room, so nothing that it shares"
    assert policy.choose(OPTIONS, LENGTHS, [80, 80]) == {0}
    assert policy.choose(OPTIONS, LENGTHS, [0, 0]) == set(range(6))
    with pytest.raises(ConfigError, match="anchors"):
        SavePolicy("some")


def test_parts_of_a_schedule_cover_its_rows_once() -> None:
    rng = random.Random(0)
    for _ in range(50):
        kept = frozenset(i for i in range(6) if rng.random() < 0.5)
        for rank in (0, 1):
            schedule = build_schedule(OPTIONS, LENGTHS, rank, 2)
            rows = [
                r for _, slices, _ in divide(schedule, kept) for s in slices for r in range(s.start, s.stop)
            ]
            assert sorted(rows) == list(range(schedule.num_tokens))
            for part, _, keep in divide(schedule, kept):
                assert {s.sequence in kept for s in part.segments} == {keep}


def test_a_compiled_function_is_not_checkpointed() -> None:
    with pytest.raises(EngineError, match="compile what encloses"):
        checkpoint(torch.compile(Layer()), torch.zeros(2, 16))
