"""Waves: a batch trained in planned parts has the loss and the gradients of the whole batch."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from tests.distributed import run_distributed
from tests.invariance.dealt import Dealer, OneSource, planned_by
from tests.invariance.reference import Sequence, window_loss
from tests.invariance.subject import MemorySource, UserModule, draw_parameters
from tests.test_placement_invariance import make_sequence
from zellige_lightning import ZelligeDataModule, ZelligeStrategy
from zellige_lightning.batch import RankBatch

GRIDS = [(3, 6, 10), (1, 4, 4), (1, 3, 5), (1, 1, 1), (5, 3, 3), (1, 2, 2), (1, 4, 4), (3, 2, 2)]


class Module(UserModule):
    """Keeps what the optimizer would see, and what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []
        self.logged: list[float] = []
        self.calls = 0

    def training_step(self, batch: RankBatch, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.log("constant", 7.0)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.logged.append(float(self.trainer.callback_metrics["loss"]))
        assert float(self.trainer.callback_metrics["constant"]) == 7.0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append({n: p.grad.clone().numpy() for n, p in self.named_parameters()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def sequences() -> tuple[Sequence, ...]:
    rng = random.Random(3)
    return tuple(make_sequence(rng, "user", grid) for grid in GRIDS * 2)


def train(rank: int, num_waves: int, accumulation: int) -> dict[str, Any]:
    world = int(os.environ["WORLD_SIZE"])
    module = Module().double()
    module.load_state_dict(draw_parameters(module, 5), strict=False)
    trainer = Trainer(
        strategy=ZelligeStrategy(profiler={"repeats": 1, "mixed_plans": 0}),
        accelerator="cpu", devices=world, max_epochs=1,
        accumulate_grad_batches=accumulation, precision="64-true", logger=False, log_every_n_steps=1,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = ZelligeDataModule(OneSource(MemorySource(sequences(), ("x",))), tokens_per_batch=200)
    with planned_by(Dealer(num_waves, world, busy=world)):
        trainer.fit(module, data)
    (monitor,) = (c for c in trainer.callbacks if hasattr(c, "records"))
    return {
        "seen": module.seen if rank == 0 else None,
        "keys": [[s.key for s in record.batch.sequences] for record in monitor.records],
        "waves": [record.num_waves for record in monitor.records],
        "logged": module.logged,
        "checksum": [float(sum(g.sum() for g in seen.values())) for seen in module.seen],
    }


@pytest.mark.parametrize(
    ("world", "num_waves", "accumulation"),
    [
        (2, 2, 1), (2, 2, 2), (2, 3, 1), (2, 3, 2), (4, 2, 2), (4, 3, 1),
        pytest.param(4, 2, 1, marks=pytest.mark.slow), pytest.param(4, 3, 2, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_waves_add_up_to_the_whole_batch(world: int, num_waves: int, accumulation: int) -> None:
    ranks = run_distributed(train, world, num_waves, accumulation, group=False)
    by_key = {s["key"]: s for s in sequences()}
    batches = [[by_key[key] for key in keys] for keys in ranks[0]["keys"]]
    assert max(ranks[0]["waves"]) == num_waves and len(batches) >= 3
    assert len({str(rank["checksum"]) for rank in ranks}) == 1
    module = UserModule().double()
    windows = [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]
    assert len(windows) == len(ranks[0]["seen"])
    for number, (window, seen) in enumerate(zip(windows, ranks[0]["seen"], strict=True)):
        parameters = {n: p.requires_grad_() for n, p in draw_parameters(module, 5).items()}
        loss = window_loss({n.removeprefix("dit."): p for n, p in parameters.items()}, "user", window)
        loss.backward()
        first = number * accumulation
        mean = sum(ranks[0]["logged"][first : first + len(window)]) / accumulation
        assert abs(mean - float(loss.detach())) <= 1e-6 * float(loss.detach())
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            size = float(parameter.grad.abs().max())
            assert size > 1e-5
            error = float((torch.from_numpy(seen[name]) - parameter.grad).abs().max()) / size
            assert error <= 1e-10, f"{name}: {error}"
