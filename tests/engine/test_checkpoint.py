"""Activation checkpointing around split attention: recomputation pairs up the same exchanges on every
rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from tests.distributed import run_distributed, run_outcomes
from tests.engine.mixes import Mix, make_engine, random_mix
from zellige_lightning.engine import checkpoint, varlen_attention
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.placement import ParallelConfig, PlacementOption, whole

HEADS, DIM = 4, 4
WIDTH = HEADS * DIM
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Checkpoint = Callable[..., Tensor]


class Layer(nn.Module):
    """Attention and a feed-forward part; `region` says what is recomputed."""

    def __init__(self, region: str) -> None:
        super().__init__()
        self.qkv, self.out = (nn.Linear(WIDTH, n * WIDTH, dtype=torch.float64) for n in (3, 1))
        self.feed = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.GELU())
        self.region = region

    def forward(self, x: Tensor, attention: Attention, checkpoint: Checkpoint) -> Tensor:
        if self.region == "layer":
            return checkpoint(lambda x: self._layer(x, lambda f, *args: f(*args), attention), x)
        return self._layer(x, checkpoint, attention)

    def _layer(self, x: Tensor, checkpoint: Checkpoint, attention: Attention) -> Tensor:
        if self.region == "attention and projection":
            return x + self.feed(checkpoint(lambda x: self.out(attention(*self._project(x)).flatten(1)), x))
        return x + self.feed(self.out(checkpoint(attention, *self._project(x)).flatten(1)))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv(x).unflatten(1, (HEADS, 3 * DIM)).split(DIM, dim=-1)


REGIONS = ("attention", "attention and projection", "layer")


def make_model(region: str, depth: int) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer(region) for _ in range(depth))


def run_model(model: nn.ModuleList, x: Tensor, attention: Attention, checkpoint: Checkpoint) -> Tensor:
    for layer in model:
        x = layer(x, attention, checkpoint)
    return x


def plainly(function: Callable[..., Tensor], *args: Any) -> Tensor:
    return function(*args)


def gradients(model: nn.ModuleList, loss: Tensor) -> Tensor:
    """Gradients of all parameters in one vector, summed over the ranks."""
    model.zero_grad()
    loss.backward()
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    dist.all_reduce(flat)
    return flat


def small_mix(rng: random.Random, world: int, num_sequences: int) -> Mix:
    return random_mix(rng, world, num_sequences, heads=HEADS, dim=DIM)


def compare_on_random_plans(rank: int, world: int, plans: int, seed: int) -> list[tuple[int, list[float]]]:
    """For each plan the number of local segments, and by region how far checkpointing changes the
    gradients."""
    rng, found = random.Random(seed), []
    models = [make_model(region, depth=3) for region in REGIONS]
    mixes = [small_mix(rng, world, rng.choice([1, 2, 3])) for _ in range(plans)]
    engine = make_engine(set().union(*(mix.rank_sets for mix in mixes)), timeout_s=30)
    for mix in mixes:
        # every other plan keeps the attention of some sequences
        kept = frozenset(i for i in range(len(mix.lengths)) if rng.random() < 0.5)
        engine.install(mix.schedule(rank), kept if rng.random() < 0.5 else frozenset())
        x, weights, *_ = mix.local(rank).flatten(2)
        with engine_of_step(engine):
            off = gradients(models[0], (run_model(models[0], x, engine, plainly) * weights).sum())
            errors = []
            for model in models:
                on = gradients(model, (run_model(model, x, engine, checkpoint) * weights).sum())
                errors.append(float((on - off).abs().max() / off.abs().max()))
        found.append((len(mix.schedule(rank).segments), errors))
    return found


def check_random_plans(world: int, plans: int, seed: int) -> None:
    found = run_distributed(compare_on_random_plans, world, world, plans, seed)
    assert {min(n, 2) for of_rank in found for n, _ in of_rank} == {0, 1, 2}
    assert len(found[0]) == plans
    assert all(error < 1e-12 for of_rank in found for _, errors in of_rank for error in errors)


@pytest.mark.parametrize(("world", "plans"), [(2, 30), (3, 20), (4, 20)])
def test_checkpointing_changes_no_gradient(world: int, plans: int) -> None:
    check_random_plans(world, plans, seed=world)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "plans"), [(2, 80), (3, 60), (4, 60)])
def test_checkpointing_changes_no_gradient_in_two_hundred_plans(world: int, plans: int) -> None:
    check_random_plans(world, plans, seed=100 + world)


def recompute_under_another_schedule(rank: int, region: str) -> float:
    """Two batches forward, then both backward, as gradient accumulation may do it; error against one by
    one."""
    rng, model = random.Random(7), make_model(region, depth=2)
    mixes = [small_mix(rng, 2, 4) for _ in range(2)]
    engine = make_engine(set().union(*(mix.rank_sets for mix in mixes)), timeout_s=30)
    calls: dict[Checkpoint, list[Tensor]] = {plainly: [], checkpoint: []}
    for how, losses in calls.items():
        for mix in mixes:
            engine.install(mix.schedule(rank))
            x, weights, *_ = mix.local(rank).flatten(2)
            with engine_of_step(engine):
                losses.append((run_model(model, x, engine, how) * weights).sum())
    engine.uninstall()  # and no schedule at all is current when backward runs
    off, on = (
        torch.stack([gradients(model, loss) for loss in order])
        for order in (calls[plainly], reversed(calls[checkpoint]))
    )
    return float((on.flip(0) - off).abs().max() / off.abs().max())


@pytest.mark.parametrize("region", REGIONS)
def test_recomputation_uses_the_schedule_of_its_forward(region: str) -> None:
    assert max(run_distributed(recompute_under_another_schedule, 2, region)) < 1e-12


class _Exchange(torch.autograd.Function):
    """One autograd node per exchange, the way most sequence-parallel code is written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int]) -> Tensor:  # type: ignore[override]
        ctx.sizes = receive, send
        received = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), receive, send)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _Exchange.apply(grad, *ctx.sizes), None, None


def exchange_by_exchange(mix: Mix, rank: int) -> Attention:
    """Attention over a Ulysses sequence of two ranks, and whole ones behind it, node by node."""
    schedule = mix.schedule(rank)
    mine, wholes = schedule.blocks[0].num_tokens, [len(s) for s in schedule.segments[1:]]
    total = mix.lengths[0]
    each = [total // 2, total - total // 2]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [torch.cat(x[:mine].chunk(2, dim=1)) for x in (q, k, v)]
        q0, k0, v0 = (_Exchange.apply(x, [mine, mine], each) for x in parts)
        out = _Exchange.apply(varlen_attention(q0, k0, v0, [total], [total]), each, [mine, mine])
        split = torch.cat(out.chunk(2), dim=1)
        if not wholes:  # so the first tensor that backward unpacks lies elsewhere than on the other rank
            return split
        return torch.cat((split, varlen_attention(q[mine:], k[mine:], v[mine:], wholes, wholes)))

    return attention


ULYSSES = PlacementOption(ParallelConfig(1, 2, 1), (0, 1))
UNEVEN = Mix(2, (12, 5), (ULYSSES, whole(0)), heads=HEADS, dim=DIM)  # rank 0 holds a whole sequence as well


def per_exchange_error(rank: int, closing: bool) -> float:
    """Error of the gradients when every exchange is a node, with and without the closing operation."""
    dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=4))
    model, attention = make_model("attention", depth=2), exchange_by_exchange(UNEVEN, rank)
    x, weights, *_ = UNEVEN.local(rank).flatten(2)

    def plain_checkpoint(function: Callable[..., Tensor], *args: Any) -> Tensor:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    how = checkpoint if closing else plain_checkpoint
    off = gradients(model, (run_model(model, x, attention, plainly) * weights).sum())
    on = gradients(model, (run_model(model, x, attention, how) * weights).sum())
    return float((on - off).abs().max() / off.abs().max())


def test_the_closing_operation_is_what_makes_it_safe() -> None:
    """The same naive engine: exact where regions end in the closing operation, wrong, hanging or aborted
    without."""
    safe = run_outcomes(per_exchange_error, 2, True, group=False)
    assert all(outcome.value is not None and outcome.value < 1e-12 for outcome in safe), safe
    plain = run_outcomes(per_exchange_error, 2, False, group=False)
    assert any(outcome.value is None or not outcome.value < 1e-3 for outcome in plain), plain
