"""The same windows through the package: planned batches, engine, mixin, data-parallel averaging, on N
ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.invariance import mutations
from tests.invariance.reference import WAN, Sequence
from tests.invariance.user_dit import UserDiT
from zellige_lightning.batch import RankBatch, materialize
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine, ProcessGroupCache
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.mixin import CoalescedAttentionMixin
from zellige_lightning.placement import Bucket, GlobalBatch, PlacementOption, Plan, Sequence as Placed
from zellige_lightning.recipes.wan21.config import WanConfig
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.sources import FieldSpec, Sample


@dataclass(frozen=True)
class Case:
    """A window of global batches with the placement of each."""

    seed: int
    model: str
    name: str
    window: tuple[tuple[Sequence, ...], ...]
    options: tuple[tuple[PlacementOption, ...], ...]
    checkpointing: bool


class UserModule(CoalescedAttentionMixin, LightningModule):
    """Somebody's DiT with the mixin in front: all that a user has to write."""

    coalesced_attention = ("dit.blocks.*.attn",)

    def __init__(self) -> None:
        super().__init__()
        self.dit = UserDiT()

    def training_step(self, batch: RankBatch, batch_idx: int) -> Tensor:
        x = batch.tokens["x"]
        out = self.dit(x, batch.positions, batch.context["c"][batch.segment_ids])
        return batch.reduce((out - torch.tanh(x)).square().mean(-1))


class WanStep(WanModule):
    """Logs nothing, since no trainer is attached."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        return None


def make_module(model: str) -> LightningModule:
    if model == "user":
        return UserModule().double()
    config = WanConfig(
        dim=WAN["dim"], ffn_dim=80, num_heads=WAN["heads"], num_layers=WAN["layers"],
        text_dim=10, text_len=5, freq_dim=WAN["freq"],
    )  # fmt: skip
    return WanStep(config).double()


def draw_parameters(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Every parameter at random: a zero head would make all other gradients zero."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for name, parameter in module.named_parameters():
        fan_in = max(2, parameter.shape[-1] if parameter.dim() > 1 else 8)
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        drawn[name] = centre + noise * fan_in**-0.5
    return drawn


class MemorySource:
    """Token fields that lie in memory."""

    def __init__(self, sequences: tuple[Sequence, ...], token_names: tuple[str, ...]) -> None:
        self.samples = tuple(Sample(s["key"], s["grid"]) for s in sequences)
        self._data = {s["key"]: s["data"] for s in sequences}
        first = sequences[0]["data"]
        self._token_names = token_names
        self.token_fields = {n: FieldSpec(tuple(first[n].shape[1:]), first[n].dtype) for n in token_names}
        self.sequence_fields = {
            n: FieldSpec(tuple(t.shape), t.dtype) for n, t in first.items() if n not in token_names
        }

    def read_tokens(self, sequence: Placed, tokens: range) -> dict[str, Tensor]:
        data = self._data[sequence.key]
        return {n: data[n][tokens.start : tokens.stop] for n in self._token_names}

    def read_sequence(self, sequence: Placed) -> dict[str, Tensor]:
        return {n: self._data[sequence.key][n] for n in self.sequence_fields}


class _Forward(nn.Module):
    """Lets the data-parallel wrapper see a training step as its forward."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: RankBatch) -> Tensor:
        return self.module.training_step(batch, 0)  # type: ignore[no-any-return]


def run_cases(rank: int, cases: list[Case], mutation: str | None = None) -> list[dict[str, Any]]:
    """Loss, gradients and counters of each case on this rank."""
    world_size = dist.get_world_size()
    groups = ProcessGroupCache(timedelta(seconds=30))
    groups.prepare({o.ranks for case in cases for options in case.options for o in options})
    undo = mutations.apply(mutation) if mutation else None
    results = [_run_case(rank, world_size, case, groups) for case in cases]
    if undo is not None:
        undo()
    return results


def _run_case(rank: int, world_size: int, case: Case, groups: ProcessGroupCache) -> dict[str, Any]:
    torch.manual_seed(1000 + rank)  # whatever a rank draws by itself must not matter
    module = make_module(case.model)
    module.load_state_dict(draw_parameters(module, case.seed), strict=False)
    _set_checkpointing(module, case.checkpointing)
    engine, router = CoalescedAttentionEngine(groups if world_size > 1 else None), AttentionRouter()
    module.route_attention(router)
    router.attention = engine
    parallel = DistributedDataParallel(_Forward(module)) if world_size > 1 else _Forward(module)
    total = 0.0
    micro_batches = _planned(rank, world_size, case)
    for i, batch in enumerate(micro_batches):
        engine.install(batch.schedule)
        last = i + 1 == len(micro_batches)
        if world_size > 1:
            parallel.require_backward_grad_sync = last
        with engine_of_step(engine):
            loss = parallel(batch) / len(micro_batches)  # as the trainer does
        loss.backward()
        total += float(loss.detach())
    mean = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(mean)
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    return {
        "loss": float(mean) / world_size,
        "gradients": {n: g.numpy() for n, g in gradients.items()} if rank == 0 else None,
        "checksum": float(sum(g.sum() for g in gradients.values())),
        "exchanges": Counter(engine.counters.exchanges),
    }


def _planned(rank: int, world_size: int, case: Case) -> list[RankBatch]:
    token_names = ("x",) if case.model == "user" else ("latents",)
    num_sequences = sum(map(len, case.window))
    num_tokens = sum(len(s["data"][token_names[0]]) for batch in case.window for s in batch)
    planned = []
    for step, (sequences, options) in enumerate(zip(case.window, case.options, strict=True)):
        placed = tuple(
            Placed(i, s["key"], Bucket("x".join(map(str, s["grid"])), s["grid"]))
            for i, s in enumerate(sequences)
        )
        batch = GlobalBatch(step, 0, placed, num_sequences, num_tokens)
        plan = Plan(step, world_size, options, (0,) * world_size, (0,) * world_size)
        source = MemorySource(sequences, token_names)
        planned.append(materialize(batch, plan, rank, source, accumulation=len(case.window)))
    return planned


def _set_checkpointing(module: LightningModule, on: bool) -> None:
    if isinstance(module, UserModule):
        module.dit.checkpointing = on
    else:
        module.model.activation_checkpointing = on
