"""The Wan2.1 text-to-video transformer for packed sequences, with the parameter names of the original.

Legend: T local tokens of S segments laid end to end, d model width, H heads, D head size, C = 16 channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zellige_lightning.engine import checkpoint, varlen_attention
from zellige_lightning.recipes.wan21.config import WanConfig
from zellige_lightning.recipes.wan21.layers import (
    FullPrecisionLinear,
    LayerNorm,
    RMSNorm,
    add_gated,
    apply_rope,
    full_precision,
    modulate,
    rope_table,
    sinusoidal_embedding,
)


@dataclass(frozen=True)
class Packing:
    """How tokens are laid out; the same in every block.

    Args:
        segment_ids: `[T]`; lengths: local tokens of each segment, `[S]` int64 on the host.
        rope: `[T, 1, D/2]` complex.
        text_len: rows of text per segment.
    """

    segment_ids: Tensor
    lengths: list[int]
    rope: Tensor
    text_len: int


class SelfAttention(nn.Module):
    """Attention among the tokens of a sequence. `attention` is what the engine replaces."""

    attention = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.heads = (config.num_heads, config.head_dim)
        self.q, self.k, self.v, self.o = (nn.Linear(config.dim, config.dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(config.dim, config.eps), RMSNorm(config.dim, config.eps)

    def forward(self, x: Tensor, packing: Packing) -> Tensor:
        v = self.v(x).unflatten(-1, self.heads)  # [T, d] -> [T, H, D]
        q = apply_rope(self.norm_q(self.q(x)).unflatten(-1, self.heads), packing.rope).to(v.dtype)
        k = apply_rope(self.norm_k(self.k(x)).unflatten(-1, self.heads), packing.rope).to(v.dtype)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, H, T, D]
        out = self.attention(q, k, v)
        return self.o(out[0].transpose(0, 1).flatten(1))


class CrossAttention(nn.Module):
    """Attention of each segment's tokens to its own text: local, no communication."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.heads = (config.num_heads, config.head_dim)
        self.q, self.k, self.v, self.o = (nn.Linear(config.dim, config.dim) for _ in range(4))
        self.norm_q, self.norm_k = RMSNorm(config.dim, config.eps), RMSNorm(config.dim, config.eps)

    def forward(self, x: Tensor, text: Tensor, packing: Packing) -> Tensor:
        """`text` is `[S * text_len, d]`. Padding rows take part, as in the original."""
        v = self.v(text).unflatten(-1, self.heads)
        q = self.norm_q(self.q(x)).unflatten(-1, self.heads).to(v.dtype)
        k = self.norm_k(self.k(text)).unflatten(-1, self.heads).to(v.dtype)
        text_lengths = torch.full_like(packing.lengths, packing.text_len)
        return self.o(varlen_attention(q, k, v, packing.lengths, text_lengths).flatten(1))


class WanBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward, the first and last of them modulated by time."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        dim, eps = config.dim, config.eps
        self.norm1 = LayerNorm(dim, eps, elementwise_affine=False)
        self.self_attn = SelfAttention(config)
        self.norm3 = LayerNorm(dim, eps, elementwise_affine=True)
        self.cross_attn = CrossAttention(config)
        self.norm2 = LayerNorm(dim, eps, elementwise_affine=False)
        self.ffn = nn.Sequential(
            nn.Linear(dim, config.ffn_dim), nn.GELU("tanh"), nn.Linear(config.ffn_dim, dim)
        )
        self.modulation = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(self, x: Tensor, time: Tensor, text: Tensor, packing: Packing) -> Tensor:
        """`x` `[T, d]`, `time` `[S, 6, d]`, `text` `[S * text_len, d]` -> `[T, d]`."""
        where = packing.segment_ids, packing.lengths
        shift1, scale1, gate1, shift2, scale2, gate2 = (full_precision(self.modulation) + time).unbind(dim=1)
        y = self.self_attn(modulate(self.norm1(x), shift1, scale1, *where).to(x.dtype), packing)
        x = add_gated(x, y, gate1, *where)
        x = x + self.cross_attn(self.norm3(x), text, packing)
        y = self.ffn(modulate(self.norm2(x), shift2, scale2, *where).to(x.dtype))
        return add_gated(x, y, gate2, *where)


class Head(nn.Module):
    """Last norm, modulated by time, and the projection to a patch in the original's order (pt, ph, pw, C)."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.norm = LayerNorm(config.dim, config.eps, elementwise_affine=False)
        self.head = FullPrecisionLinear(config.dim, math.prod(config.patch_size) * config.out_dim)
        self.modulation = nn.Parameter(torch.randn(1, 2, config.dim) / config.dim**0.5)

    def forward(self, x: Tensor, time: Tensor, packing: Packing) -> Tensor:
        """`x` `[T, d]`, `time` `[S, d]` -> `[T, 64]` in fp32."""
        shift, scale = (full_precision(self.modulation) + time[:, None]).unbind(dim=1)
        return self.head(modulate(self.norm(x), shift, scale, packing.segment_ids, packing.lengths))


class WanModel(nn.Module):
    """Velocity of noised tokens.

    Args:
        config: sizes.
        activation_checkpointing: recompute each block in backward instead of keeping its activations.
    """

    def __init__(self, config: WanConfig, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config, self.activation_checkpointing = config, activation_checkpointing
        dim = config.dim
        self.patch_embedding = nn.Conv3d(config.in_dim, dim, config.patch_size, stride=config.patch_size)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, dim), nn.GELU("tanh"), nn.Linear(dim, dim)
        )
        self.time_embedding = nn.Sequential(
            FullPrecisionLinear(config.freq_dim, dim), nn.SiLU(), FullPrecisionLinear(dim, dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), FullPrecisionLinear(dim, dim * 6))
        self.blocks = nn.ModuleList(WanBlock(config) for _ in range(config.num_layers))
        self.head = Head(config)
        self.init_weights()

    def init_weights(self) -> None:
        """As the original: Xavier, N(0, 0.02) for text and time embeddings, and a zero head."""
        for module in self.modules():
            self.init_module(module)

    def init_module(self, module: nn.Module) -> None:
        """Initial values of what one module of the model holds itself."""
        if module is self.head.head:
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
            if any(module is own for own in (*self.text_embedding, *self.time_embedding)):
                nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, WanBlock | Head):
            nn.init.normal_(module.modulation, std=module.modulation.shape[-1] ** -0.5)
        elif module is self.patch_embedding:
            module.reset_parameters()  # of which the bias stays
            nn.init.xavier_uniform_(module.weight.flatten(1))
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        segment_ids: Tensor,
        timesteps: Tensor,
        context: Tensor,
        q_lengths: Rows[int],
    ) -> Tensor:
        """Velocity `[T, 64]` in fp32, in the order of the input tokens. T and S may be 0.

        Args:
            tokens: `[T, 64]`, each a patch in the order (channel, pt, ph, pw).
            positions: `[T, 3]` absolute (t, y, x).
            segment_ids: `[T]`, ascending; q_lengths: local tokens of each of the S segments.
            timesteps: `[S]`, 1000 s.
            context: `[S, text_len, text_dim]`, zero beyond the caption.
        """
        dtype = self.patch_embedding.weight.dtype
        packing = Packing(
            segment_ids,
            torch.tensor(list(q_lengths), dtype=torch.int64),
            rope_table(positions, self.config.rope_pairs),
            context.shape[1],
        )
        x = F.linear(tokens.to(dtype), self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        time = self.time_embedding(sinusoidal_embedding(timesteps, self.config.freq_dim))
        modulation = self.time_projection(time).unflatten(1, (6, -1))  # [S, 6, d]
        text = self.text_embedding(context.to(dtype).flatten(0, 1))  # [S * text_len, d]
        for block in self.blocks:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, modulation, text, packing)
            else:
                x = block(x, modulation, text, packing)
        out = self.head(x, time, packing)
        # [T, pt*ph*pw*C] -> [T, C*pt*ph*pw]
        return out.unflatten(1, (-1, self.config.out_dim)).transpose(1, 2).flatten(1)
