"""What cannot be exact is refused on every rank before it trains; what is not planned trains as under
plain DDP."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed import run_distributed, run_outcomes
from tests.lightning.toy import (
    CHANNELS,
    HEADS,
    WIDTH,
    Layer,
    Net,
    Toy,
    batches_of,
    callback_of,
    flat,
    largest_difference,
    make_data,
    make_toy,
    make_trainer,
    model_prices,
    reference_training,
)
from zellige_lightning import ZelligeStrategy
from zellige_lightning.batch import RankBatch
from zellige_lightning.mixin import CoalescedAttentionMixin
from zellige_lightning.monitor import MakespanMonitor

# ---- models whose tokens mix outside the engine
# ---------------------------------------------------------------


class TemporalConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.kernel(x.T[None])[0].T


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(0, keepdim=True)


class Unmatched(nn.Module):
    """Self-attention that `coalesced_attention` does not name."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(0, 1)[None] for t in self.qkv(x).chunk(3, -1))
        return x + F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)


class OwnPositions(nn.Module):
    """Counts tokens from the start of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(len(x), dtype=x.dtype)[:, None] / 10


class PerSequence(nn.Module):
    """Applies a module to each local segment: right for whole sequences."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.lengths = inner, [0]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.inner(part) for part in x.split(self.lengths)])


class MixingLayer(Layer):
    def __init__(self, mixing: nn.Module) -> None:
        super().__init__()
        self.mixing = mixing

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.mixing(x))


MIXING = {"conv": TemporalConvolution, "pool": Pooled, "attention": Unmatched, "positions": OwnPositions}


class Mixing(Toy):
    def __init__(self, kind: str, per_sequence: bool) -> None:
        super().__init__()
        self.kind = kind
        if kind in MIXING:
            mixing = [MIXING[kind]() for _ in range(2)]
            layers = [MixingLayer(PerSequence(m) if per_sequence else m) for m in mixing]
            self.net.layers = nn.ModuleList(layers)

    def training_step(self, batch: RankBatch, batch_idx: int) -> Tensor:
        for module in self.modules():
            if isinstance(module, PerSequence):
                module.lengths = batch.lengths
        if self.kind == "mean loss":
            return self.per_token(batch).mean()
        if self.kind == "no loss":
            return None  # type: ignore[return-value]
        return super().training_step(batch, batch_idx)


def train_mixing(rank: int, kind: str, per_sequence: bool, planner: dict[str, Any]) -> dict[str, Any]:
    model_prices()
    trainer = make_trainer(ZelligeStrategy(planner=planner), limit_train_batches=2)
    toy = make_toy(Mixing, kind=kind, per_sequence=per_sequence)
    trainer.fit(toy, make_data())
    records = callback_of(trainer, MakespanMonitor).records
    return {
        "parameters": flat(toy),
        "splits": sum(r.num_splits for r in records),
        "steps": trainer.global_step,
    }


@pytest.mark.parametrize("per_sequence", [False, True])
@pytest.mark.parametrize("kind", list(MIXING))
def test_tokens_that_mix_outside_the_engine_are_named_on_every_rank(kind: str, per_sequence: bool) -> None:
    for outcome in run_outcomes(train_mixing, 2, kind, per_sequence, {}, group=False):
        assert outcome.error is not None
        assert outcome.error[0] == "EngineError", outcome.trace
        assert "module 'net.layers.0.mixing" in outcome.error[1] and "outside the engine" in outcome.error[1]
        assert "planner.max_degree=1" in outcome.error[1]


@pytest.mark.parametrize(
    ("kind", "text"),
    [("mean loss", "loss of two "), ("no loss", "training_step of Mixing returned NoneType")],
)
def test_losses_that_depend_on_the_placement_are_refused(kind: str, text: str) -> None:
    for outcome in run_outcomes(train_mixing, 2, kind, False, {}, group=False):
        assert outcome.error is not None
        assert outcome.error[0] == "EngineError" and text in outcome.error[1]
        assert "return batch.reduce(per_token_loss)" in outcome.error[1]


@pytest.mark.parametrize("kind", list(MIXING))
def test_whole_sequences_train_where_shards_cannot(kind: str) -> None:
    first, second = run_distributed(train_mixing, 2, kind, True, {"max_degree": 1}, group=False)
    assert first["parameters"] == second["parameters"]
    assert first["splits"] == 0 and first["steps"] == 2


@pytest.mark.parametrize(("kind", "world"), [("conv", 2), ("pool", 1), ("attention", 1), ("positions", 1)])
def test_sequences_that_mix_in_a_pack_are_refused(kind: str, world: int) -> None:
    for outcome in run_outcomes(train_mixing, world, kind, False, {"max_degree": 1}, group=False):
        assert outcome.error is not None
        assert outcome.error[0] == "EngineError", outcome.trace
        assert "module 'net.layers.0.mixing" in outcome.error[1]
        assert "mixes tokens of different sequences" in outcome.error[1]


# ---- settings and models that are refused
# ---------------------------------------------------------------------


class Unplanned(LightningModule):
    """No mixin."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: RankBatch, batch_idx: int) -> Tensor:
        return batch.reduce(self.net(batch.tokens["x"], batch.positions).square().mean(-1))

    def validation_step(self, batch: RankBatch, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Manual(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Nothing(Toy):
    coalesced_attention = ("net.blocks.*.attn",)


class Hooked(Toy):
    """Its layers run through functions that hold them, which no copy can change."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.net.layers:
            layer.forward = lambda x, plain=layer.forward: plain(x)


def refused(rank: int, case: str) -> None:
    model_prices()
    static = ZelligeStrategy(static_graph=True)
    schedule = [GradientAccumulationScheduler({0: 1, 1: 2})]
    if case == "no mixin":
        make_trainer(limit_val_batches=1, num_sanity_val_steps=1).fit(Unplanned(), make_data())
    elif case == "no mixin, evaluation":
        make_trainer(limit_val_batches=1).validate(Unplanned(), make_data(), verbose=False)
    elif case == "manual":
        make_trainer().fit(make_toy(Manual), make_data())
    elif case == "static graph":
        make_trainer(static, accumulate_grad_batches=2).fit(make_toy(), make_data())
    elif case == "static graph, schedule":
        make_trainer(static, callbacks=schedule).fit(make_toy(), make_data())
    elif case == "static graph, waves":
        small = ZelligeStrategy(static_graph=True, memory_cap_gib=0.5 / 1024)
        make_trainer(small).fit(make_toy(), make_data(tokens_per_batch=400))
    elif case == "pattern":
        make_trainer().fit(make_toy(Nothing), make_data())
    elif case == "copy":
        make_trainer().fit(make_toy(Hooked), make_data())
    elif case == "other strategy":
        make_trainer("ddp").fit(make_toy(), make_data())


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        (
            "no mixin",
            "EngineError",
            "Unplanned is to run on planned batches and has no CoalescedAttentionMixin",
        ),
        ("no mixin, evaluation", "EngineError", "Unplanned is to run on planned batches"),
        ("manual", "ConfigError", "manual optimization"),
        ("static graph", "ConfigError", "static_graph=True with accumulate_grad_batches > 1"),
        ("static graph, schedule", "ConfigError", "static_graph=True with accumulate_grad_batches > 1"),
        ("static graph, waves", "ConfigError", "static_graph=True, and a batch that trains in waves"),
        ("pattern", "EngineError", "no module of Nothing matches coalesced_attention=('net.blocks.*.attn',)"),
        ("copy", "EngineError", "runs parameters of the original, such as 'net.layers.0.attn"),
        ("other strategy", "ConfigError", "a global batch arrived without a plan"),
    ],
)
def test_refused_on_every_rank(case: str, kind: str, text: str) -> None:
    for outcome in run_outcomes(refused, 2, case, group=False):
        assert outcome.error is not None
        assert outcome.error[0] == kind and text in outcome.error[1], outcome.trace


def static(rank: int) -> dict[str, Any]:
    model_prices()
    trainer, toy = make_trainer(ZelligeStrategy(static_graph=True), limit_train_batches=3), make_toy()
    trainer.fit(toy, make_data())
    return {"parameters": flat(toy), "batches": batches_of(callback_of(trainer, MakespanMonitor).records)}


def test_a_static_graph_without_accumulation_is_exact() -> None:
    first, second = run_distributed(static, 2, group=False)
    assert first["parameters"] == second["parameters"]
    assert largest_difference(first["parameters"], reference_training(first["batches"])[0]) < 1e-6


# ---- batches that are not planned
# -----------------------------------------------------------------------------


class Regression(LightningModule):
    """Somebody's model that knows nothing of sequences."""

    def __init__(self, stopped_rank: int = -1) -> None:
        super().__init__()
        self.layer, self.stopped_rank = nn.Linear(CHANNELS, 1), stopped_rank

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == self.stopped_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        (x,) = batch
        return self.layer(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class AttendingRegression(CoalescedAttentionMixin, Regression):
    """The mixin changes nothing where nothing is planned."""

    coalesced_attention = ("layer",)


def rows() -> DataLoader:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        TensorDataset(torch.randn(24, CHANNELS, generator=generator)), batch_size=2, shuffle=True
    )


def plain(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, strategy, kind in (
        ("ddp", "ddp", Regression),
        ("zellige", "zellige", Regression),
        ("mixin", "zellige", AttendingRegression),
    ):
        torch.manual_seed(0)
        model = kind()
        trainer = make_trainer(strategy, max_epochs=2, reload_dataloaders_every_n_epochs=1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(model, rows())
        found[name] = flat(model)
        found[f"{name} warnings"] = sum("is not planned" in str(w.message) for w in caught)
    return found


def test_plain_dataloaders_train_as_under_ddp_with_one_warning() -> None:
    first, second = run_distributed(plain, 2, group=False)
    assert first["ddp"] == first["zellige"] == first["mixin"] == second["zellige"]
    assert (first["ddp warnings"], first["zellige warnings"], first["mixin warnings"]) == (0, 1, 1)
    assert second["zellige warnings"] == 0, "rank 0 speaks for all"


def stopped(rank: int, stopped_rank: int) -> tuple[str, int]:
    trainer: Trainer = make_trainer("zellige", max_epochs=2)
    try:
        trainer.fit(Regression(stopped_rank), rows())
    except SIGTERMException as error:
        return type(error).__name__, trainer.global_step
    return "nothing", trainer.global_step


@pytest.mark.parametrize("stopped_rank", [0, 1])
def test_sigterm_stops_unplanned_training_too(stopped_rank: int) -> None:
    assert run_distributed(stopped, 2, stopped_rank, group=False) == [("SIGTERMException", 2)] * 2
