"""Sharded parameters under placement: loss and gradients are those of single-process training, for every
placement, with accumulation, waves and checkpointing, and where ranks have no tokens."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

from tests.distributed import run_distributed
from tests.invariance.dealt import Dealer, OneSource, planned_by
from tests.invariance.reference import Sequence, window_loss
from tests.invariance.subject import MemorySource, draw_parameters, make_module
from tests.lightning.toy import model_prices, whole_tensor
from tests.test_placement_invariance import make_sequence
from zellige_lightning import ZelligeDataModule, ZelligeFSDP2Strategy

GRIDS = [(3, 6, 10), (1, 4, 4), (1, 3, 5), (1, 1, 1), (5, 3, 3), (1, 2, 2), (1, 4, 4), (3, 2, 2)]


@dataclass(frozen=True)
class Case:
    """A run: `idle` leaves the second half of the ranks without tokens. Double precision needs the strategy's
    name, since Lightning refuses it to instances."""

    model: str
    tolerance: float
    num_waves: int = 1
    accumulation: int = 1
    checkpointing: bool = False
    idle: bool = False
    precision: str = "32-true"
    keep_gradients: bool | None = None


CASES = {
    "double": Case("user", 1e-10, precision="64-true"),
    "double, waves, accumulation": Case(
        "user", 1e-10, num_waves=2, accumulation=2, checkpointing=True, precision="64-true"
    ),
    "plain": Case("user", 1e-5),
    "accumulation, checkpointing": Case("wan", 1e-5, accumulation=2, checkpointing=True, keep_gradients=True),
    "waves, checkpointing": Case("user", 1e-5, num_waves=3, checkpointing=True, keep_gradients=True),
    "reduced each time": Case("user", 1e-5, num_waves=2, accumulation=2, keep_gradients=False),
    "idle ranks": Case("wan", 1e-5, idle=True, checkpointing=True),
    "idle ranks, accumulation": Case("user", 1e-5, idle=True, accumulation=2),
    "mixed precision": Case("wan", 3e-2, checkpointing=True, precision="bf16-mixed"),
}


def data_of(case: Case) -> tuple[Sequence, ...]:
    """Values that single precision holds."""
    rng = random.Random(3)
    sequences = tuple(make_sequence(rng, case.model, grid) for grid in GRIDS * 2)
    return tuple({**s, "data": {n: t.float() for n, t in s["data"].items()}} for s in sequences)


def module_of(case: Case) -> LightningModule:
    module = make_module(case.model)
    module.load_state_dict(draw_parameters(module, 5), strict=False)
    if case.model == "user":
        module.dit.checkpointing = case.checkpointing  # type: ignore[union-attr]
    else:
        module.model.activation_checkpointing = case.checkpointing  # type: ignore[union-attr]
    return module if case.precision == "64-true" else module.float()


def watch(module: LightningModule, seen: list[dict[str, Any]]) -> None:
    """Keep what the optimizer would see; train with rate 0."""

    def before_step(optimizer: Any) -> None:
        seen.append({n: whole_tensor(p.grad).double().numpy() for n, p in module.named_parameters()})

    module.on_before_optimizer_step = before_step  # type: ignore[method-assign]
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.0)  # type: ignore[method-assign]


def train(rank: int, names: list[str]) -> dict[str, dict[str, Any]]:
    model_prices()
    return {name: train_one(rank, CASES[name]) for name in names}


def train_one(rank: int, case: Case) -> dict[str, Any]:
    torch.manual_seed(100 + rank)
    world = int(os.environ["WORLD_SIZE"])
    strategy: Any = "zellige_fsdp2"
    if case.precision != "64-true":
        strategy = ZelligeFSDP2Strategy(
            keep_gradients=case.keep_gradients, profiler={"repeats": 1, "mixed_plans": 0}
        )
    module, seen = module_of(case), []
    watch(module, seen)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_epochs=1, logger=False,
        accumulate_grad_batches=case.accumulation, precision=case.precision, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    reduced = Counter()
    name = next(n for n in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, n))
    reduce_scatter = getattr(dist, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        reduced["calls"] += 1
        return reduce_scatter(*args, **kwargs)

    setattr(dist, name, counted)
    source = MemorySource(data_of(case), ("x",) if case.model == "user" else ("latents",))
    busy = max(1, world // 2) if case.idle else world
    with planned_by(Dealer(case.num_waves, world, busy)):
        trainer.fit(module, ZelligeDataModule(OneSource(source), tokens_per_batch=200))
    setattr(dist, name, reduce_scatter)
    (monitor,) = (c for c in trainer.callbacks if hasattr(c, "records"))
    return {
        "seen": seen if rank == 0 else None,
        "keys": [[s.key for s in record.batch.sequences] for record in monitor.records],
        "waves": [record.num_waves for record in monitor.records],
        "reduced": reduced["calls"],
    }


def check(case: Case, result: dict[str, Any]) -> None:
    dtype = torch.float64 if case.model == "user" else torch.float32  # Wan's noise is drawn in the latter
    by_key = {s["key"]: {**s, "data": {n: t.to(dtype) for n, t in s["data"].items()}} for s in data_of(case)}
    batches = [[by_key[key] for key in keys] for keys in result["keys"]]
    windows = [batches[i : i + case.accumulation] for i in range(0, len(batches), case.accumulation)]
    assert max(result["waves"]) == case.num_waves and len(windows) == len(result["seen"]) >= 2
    for window, seen in zip(windows, result["seen"], strict=True):
        parameters = {n: p.detach().double().requires_grad_() for n, p in module_of(case).named_parameters()}
        window_loss({n.removeprefix("dit."): p for n, p in parameters.items()}, case.model, window).backward()
        gradients = {n: (torch.from_numpy(seen[n]), p.grad) for n, p in parameters.items()}
        if case.precision == "bf16-mixed":  # single values of small gradients are noise
            gradients = {
                "all": tuple(
                    torch.cat([t.flatten() for t in g]) for g in zip(*gradients.values(), strict=True)
                )
            }
        for name, (found, expected) in gradients.items():
            size = float(expected.norm())
            error = float((found - expected).norm()) / size
            assert size > 1e-5 and error <= case.tolerance, f"{name}: {error}"


UNITS = 3  # two layers, and the module that holds the rest


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_gradients_do_not_depend_on_placement(world: int) -> None:
    results = run_distributed(train, world, list(CASES), group=False, timeout_s=300.0)[0]
    for name, case in CASES.items():
        result = results[name]
        try:
            check(case, result)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        reductions = sum(result["waves"]) if case.keep_gradients is False else len(result["seen"])
        assert result["reduced"] == UNITS * reductions, f"{name}: gradients were reduced needlessly"
