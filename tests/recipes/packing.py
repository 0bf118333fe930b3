"""Helpers: random samples packed as a model sees them, and attention within each segment without a plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zellige_lightning.batch import positions_of
from zellige_lightning.engine import AttentionRouter, varlen_attention
from zellige_lightning.recipes.wan21.config import WanConfig
from zellige_lightning.recipes.wan21.model import WanModel
from zellige_lightning.recipes.wan21.patchify import patchify


@dataclass
class Packed:
    """Arguments of `WanModel.forward`, and the dense latents that they came from."""

    latents: list[Tensor]
    arguments: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[int]]


def pack(config: WanConfig, grids: list[tuple[int, int, int]], dtype: torch.dtype, seed: int = 0) -> Packed:
    g = torch.Generator().manual_seed(seed)
    latents = [torch.randn(16, t, 2 * h, 2 * w, generator=g).to(dtype) for t, h, w in grids]
    lengths = [t * h * w for t, h, w in grids]
    text = torch.randn(len(grids), config.text_len, config.text_dim, generator=g).to(dtype)
    text[:, config.text_len // 2 :] = 0.0
    times = torch.rand(len(grids), generator=g).mul(1000.0).to(dtype)
    tokens = torch.cat([patchify(x) for x in latents] or [torch.zeros(0, 64, dtype=dtype)])
    positions = torch.cat(
        [positions_of(range(n), grid) for n, grid in zip(lengths, grids, strict=True)]
        or [torch.zeros(0, 3, dtype=torch.int64)]
    )
    segment_ids = torch.repeat_interleave(torch.arange(len(grids)), torch.tensor(lengths, dtype=torch.int64))
    return Packed(latents, (tokens, positions, segment_ids, times, text, lengths))


@contextmanager
def block_diagonal(model: nn.Module, lengths: list[int]) -> Iterator[None]:
    """Self-attention within segments, as the engine answers it on one rank."""
    router = AttentionRouter()
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            router.attach(name, module)

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return varlen_attention(q, k, v, lengths, lengths)

    try:
        with router.answered_by(attention):
            yield
    finally:
        router.detach()


def random_model(config: WanConfig, dtype: torch.dtype, **options: bool) -> WanModel:
    """Every parameter away from its initial value, so that none can hide an error."""
    torch.manual_seed(1)
    model = WanModel(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)
