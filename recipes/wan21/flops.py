"""Floating-point operations of Wan2.1, exactly as PyTorch's FlopCounterMode counts them.

Notation: L tokens of a sequence, d width, f feed-forward width, c text rows, n layers.
"""

from __future__ import annotations

from collections.abc import Iterable

from zellige_lightning.recipes.wan21.config import WanConfig


def attention_flops(config: WanConfig, num_tokens: int) -> int:
    """Forward score and value products of one layer: 4 d L^2 among tokens, 4 d c L with the text."""
    return 4 * config.dim * num_tokens * (num_tokens + config.text_len)


def layer_flops(config: WanConfig, num_tokens: int) -> int:
    """Forward of one block: projections 12 d^2 L, text keys and values 4 d^2 c, feed-forward 4 d f L, and
    attention."""
    d, rows = config.dim, num_tokens
    linear = 12 * d * d * rows + 4 * d * d * config.text_len + 4 * d * config.ffn_dim * rows
    return linear + attention_flops(config, num_tokens)


def forward_flops(config: WanConfig, num_tokens: int) -> int:
    """Forward of the whole model for one sequence."""
    d, patch = config.dim, config.in_dim * 4
    embeddings = 4 * patch * d * num_tokens  # patches in and out
    text = 2 * config.text_len * (config.text_dim * d + d * d)
    time = 2 * (config.freq_dim * d + 7 * d * d)
    return config.num_layers * layer_flops(config, num_tokens) + embeddings + text + time


def model_flops(config: WanConfig, lengths: Iterable[int]) -> int:
    """Of a training step, 3 F: what MFU counts, recomputation left out."""
    return sum(3 * forward_flops(config, length) for length in lengths)


def executed_layer_flops(config: WanConfig, num_tokens: int) -> int:
    """Forward, recomputation and backward of one checkpointed block: 4 forwards, and half an attention more,
    since the backward of flash attention is 2.5 forwards."""
    return 4 * layer_flops(config, num_tokens) + attention_flops(config, num_tokens) // 2


def executed_flops(config: WanConfig, num_tokens: int) -> int:
    """Of a training step with checkpointed blocks: what the GPU computes, the recomputation included."""
    blocks = config.num_layers * layer_flops(config, num_tokens)
    rest = forward_flops(config, num_tokens) - blocks
    return 3 * rest + config.num_layers * executed_layer_flops(config, num_tokens)
