"""Wan2.1 for one dense clip, written from the original's description and sharing no code with the recipe.

Everything in the precision of the weights (the tests use fp64). Latents `[C, T, h, w]`, text
`[text_len, text_dim]`.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def layer_norm(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-6)


def rotate(x: Tensor, grid: tuple[int, int, int]) -> Tensor:
    """`[H, L, D]`: the pairs of a head are shared out to t, y and x, each counted from 0."""
    head_dim = x.shape[-1]
    pairs = head_dim // 2
    counts = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    steps = [torch.arange(n, dtype=torch.float64) for n in grid]
    mesh = torch.meshgrid(*steps, indexing="ij")
    angles = []
    for axis, count in zip(mesh, counts, strict=True):
        for i in range(count):
            angles.append(axis.reshape(-1) / 10000 ** (2 * i / (2 * count)))
    angle = torch.stack(angles, -1)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.empty_like(x)
    out[..., 0::2] = even * angle.cos() - odd * angle.sin()
    out[..., 1::2] = even * angle.sin() + odd * angle.cos()
    return out


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`[H, L, D]` each."""
    return torch.softmax(q @ k.transpose(1, 2) / math.sqrt(q.shape[-1]), -1) @ v


def heads(x: Tensor, num_heads: int) -> Tensor:
    return x.reshape(len(x), num_heads, -1).transpose(0, 1)


def attention(w: Weights, name: str, x: Tensor, other: Tensor, num_heads: int, grid: tuple | None) -> Tensor:
    q = heads(rms(linear(w, f"{name}.q", x), w[f"{name}.norm_q.weight"]), num_heads)
    k = heads(rms(linear(w, f"{name}.k", other), w[f"{name}.norm_k.weight"]), num_heads)
    v = heads(linear(w, f"{name}.v", other), num_heads)
    if grid is not None:
        q, k = rotate(q, grid), rotate(k, grid)
    return linear(w, f"{name}.o", attend(q, k, v).transpose(0, 1).reshape(len(x), -1))


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def wan(w: Weights, num_heads: int, latents: Tensor, time: float, text: Tensor) -> Tensor:
    """Velocity `[C, T, h, w]`."""
    x = F.conv3d(latents[None], w["patch_embedding.weight"], w["patch_embedding.bias"], stride=(1, 2, 2))
    grid = tuple(x.shape[2:])
    x = x[0].flatten(1).T
    half = w["time_embedding.0.weight"].shape[1] // 2
    angle = time * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    e = linear(w, "time_embedding.0", torch.cat((angle.cos(), angle.sin())).to(x.dtype))
    e = linear(w, "time_embedding.2", F.silu(e))
    e6 = linear(w, "time_projection.1", F.silu(e)).reshape(6, -1)
    context = linear(w, "text_embedding.2", gelu(linear(w, "text_embedding.0", text)))
    num_layers = 1 + max(int(name.split(".")[1]) for name in w if name.startswith("blocks."))
    for i in range(num_layers):
        b = f"blocks.{i}"
        m = w[f"{b}.modulation"][0] + e6
        y = layer_norm(x) * (1 + m[1]) + m[0]
        x = x + attention(w, f"{b}.self_attn", y, y, num_heads, grid) * m[2]
        y = layer_norm(x) * w[f"{b}.norm3.weight"] + w[f"{b}.norm3.bias"]
        x = x + attention(w, f"{b}.cross_attn", y, context, num_heads, None)
        y = layer_norm(x) * (1 + m[4]) + m[3]
        x = x + linear(w, f"{b}.ffn.2", gelu(linear(w, f"{b}.ffn.0", y))) * m[5]
    m = w["head.modulation"][0] + e
    y = linear(w, "head.head", layer_norm(x) * (1 + m[1]) + m[0])
    frames, rows, columns = grid
    patches = y.reshape(frames, rows, columns, 1, 2, 2, -1)
    return torch.einsum("fhwpqrc->cfphqwr", patches).reshape(-1, frames, rows * 2, columns * 2)
