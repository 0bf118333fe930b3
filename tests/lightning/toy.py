"""A small diffusion-like model, its data, and its training in plain torch without anything of the engine."""

from __future__ import annotations

import os
from collections.abc import Sequence as Rows
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zellige_lightning import ZelligeDataModule, ZelligeStrategy, preparation
from zellige_lightning.batch import RankBatch
from zellige_lightning.errors import DataError
from zellige_lightning.mixin import CoalescedAttentionMixin
from zellige_lightning.placement import Sequence
from zellige_lightning.planner import ProfileTable
from zellige_lightning.report.records import StepRecord
from zellige_lightning.sources import FieldSpec, Sample

CHANNELS, WIDTH, HEADS = 4, 16, 4
IMAGES, VIDEOS = 12, 4
Grid = tuple[int, int, int]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(0, 1)[None] for t in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Net(nn.Module):
    """[T, CHANNELS] tokens at [T, 3] positions -> [T, CHANNELS]. Nothing in it knows of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(CHANNELS, WIDTH), nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embed(x) + self.place(positions.to(self.place.weight.dtype) / 8)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


class Toy(CoalescedAttentionMixin, LightningModule):
    """The model as a user writes it. Remembers what it was trained on."""

    coalesced_attention = ("net.layers.*.attn",)

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.net, self.lr = Net(), lr
        self.seen: list[tuple[int, tuple[str, ...]]] = []  # (epoch, keys of the global batch)

    def per_token(self, batch: RankBatch) -> Tensor:
        x = batch.tokens["x"]
        return (self.net(x, batch.positions) - torch.tanh(x)).square().mean(-1)

    def training_step(self, batch: RankBatch, batch_idx: int) -> Tensor:
        self.seen.append((batch.epoch, tuple(s.key for s in batch.global_batch.sequences)))
        loss = batch.reduce(self.per_token(batch))
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: RankBatch, batch_idx: int) -> None:
        self.log("val", batch.reduce(self.per_token(batch)))

    def test_step(self, batch: RankBatch, batch_idx: int) -> None:
        self.log("test", batch.reduce(self.per_token(batch)))

    def predict_step(self, batch: RankBatch, batch_idx: int) -> dict[str, float]:
        losses = self.per_token(batch)
        ends = torch.tensor(batch.lengths).cumsum(0).tolist()
        rows = zip(batch.sequences, batch.lengths, ends, strict=True)
        return {s.key: losses[end - length : end].mean().item() for s, length, end in rows}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def tokens_of(key: str, grid: Grid) -> Tensor:
    """The sample, [T, CHANNELS]."""
    generator = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(key)) % 2**31)
    return torch.randn(grid[0] * grid[1] * grid[2], CHANNELS, generator=generator, dtype=torch.float32)


def positions_of(grid: Grid) -> Tensor:
    axes = [torch.arange(n) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)


class Source:
    """Knows its samples and nothing else, like a folder of latents."""

    token_fields, sequence_fields = {"x": FieldSpec((CHANNELS,), torch.float32)}, {}

    def __init__(self, prefix: str, images: int = IMAGES, videos: int = VIDEOS) -> None:
        grids = {f"{prefix}-image{i}": (1, 3, 3 + i % 2) for i in range(images)}
        grids |= {f"{prefix}-video{i}": (4, 4, 5) for i in range(videos)}
        self.grids: dict[str, Grid] = grids
        self.samples = tuple(Sample(key, grid) for key, grid in grids.items())

    def read_tokens(self, sequence: Sequence, tokens: range) -> dict[str, Tensor]:
        if sequence.key not in self.grids:
            raise DataError(f"no sample {sequence.key!r}")
        return {"x": tokens_of(sequence.key, sequence.bucket.grid)[tokens.start : tokens.stop]}

    def read_sequence(self, sequence: Sequence) -> dict[str, Tensor]:
        return {}


class ToyData(LightningDataModule):
    """`train_calls` counts how often the training data was asked for."""

    def __init__(self, held_out: Source | None = None) -> None:
        super().__init__()
        self.train_calls, self.held_out = 0, held_out or Source("val", 5, 2)

    def train_dataloader(self) -> Source:
        self.train_calls += 1
        return Source("train")

    def val_dataloader(self) -> Source:
        return self.held_out

    def test_dataloader(self) -> Source:
        return self.held_out

    def predict_dataloader(self) -> Source:
        return self.held_out


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def model_prices() -> None:
    """From now on, this process does not measure prices: splitting long sequences pays, and plans are
    always the same. Profiling has tests of its own."""

    def modeled(
        measurement: Any, config: Any, buckets: Any, configs: Any, topology: Any, *rest: Any
    ) -> ProfileTable:
        prices = {
            (bucket.name, config, where): (bucket.num_tokens * 40) // config.degree + 10 * config.degree
            for bucket in buckets
            for config in configs
            for where in ("node", "cross")
            if config.degree <= bucket.num_tokens
        }
        return ProfileTable(buckets, prices, {}, 100, rest[-1])

    preparation.measure_table = modeled


def make_trainer(strategy: Any = None, **settings: Any) -> Trainer:
    """A quiet trainer on all processes of this test."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "max_epochs": 1,
    }
    if settings.get("barebones"):
        quiet = {"max_epochs": 1}
    chosen = strategy if strategy is not None else ZelligeStrategy()
    return Trainer(strategy=chosen, accelerator="cpu", devices=world_size(), **(quiet | settings))


def make_data(data: LightningDataModule | None = None, **settings: Any) -> ZelligeDataModule:
    settings = {"tokens_per_batch": 150, "video_token_share": 0.6, **settings}
    return ZelligeDataModule(data or ToyData(), **settings)


def make_toy(model: type[Toy] = Toy, **settings: Any) -> Toy:
    seed_everything(0, workers=True, verbose=False)
    return model(**settings)


def callback_of(trainer: Trainer, kind: type[Callback]) -> Any:
    (found,) = [c for c in trainer.callbacks if isinstance(c, kind)]
    return found


def whole_tensor(tensor: Tensor | None) -> Tensor:
    """The values on every rank, also of one that is sharded: then a collective."""
    assert tensor is not None
    values = tensor.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values


def digest(module: nn.Module) -> bytes:
    """Every bit of the parameters and buffers."""
    values = [whole_tensor(t).reshape(-1) for t in module.state_dict().values()]
    return b"".join(t.view(torch.uint8).numpy().tobytes() for t in values)


def flat(module: nn.Module) -> list[float]:
    """All parameters, in order."""
    return torch.cat([whole_tensor(p).flatten().double() for p in module.parameters()]).tolist()


def largest_difference(a: Rows[float], b: Rows[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


# ---- the same training without the package: one process, each sequence alone
# ----------------------------------


def reference_loss(net: Net, key: str, grid: Grid) -> Tensor:
    x = tokens_of(key, grid)
    return (net(x, positions_of(grid)) - torch.tanh(x)).square().mean(-1).mean()


def reference_training(
    batches: Rows[Rows[tuple[str, Grid]]],
    *,
    window: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    lr: float = 0.1,
) -> tuple[list[float], list[float]]:
    """Parameters after, and loss before, each optimizer step over `window` batches (the last may be
    shorter)."""
    seed_everything(0, verbose=False)
    net = Toy().net
    optimizer = torch.optim.SGD(net.parameters(), lr)
    losses = []
    for start in range(0, len(batches), window):
        sequences = [s for batch in batches[start : start + window] for s in batch]
        loss = torch.stack([reference_loss(net, *s) for s in sequences]).mean()
        optimizer.zero_grad()
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        if clip_value is not None:
            nn.utils.clip_grad_value_(net.parameters(), clip_value)
        optimizer.step()
        losses.append(loss.item())
    return flat(net), losses


def batches_of(records: Rows[StepRecord]) -> list[list[tuple[str, Grid]]]:
    return [[(s.key, s.bucket.grid) for s in record.batch.sequences] for record in records]
