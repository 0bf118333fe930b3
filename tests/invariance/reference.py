"""One process, plain torch, each sequence alone through plain attention. Nothing of the package is imported
here.

A sequence is a dict: `key`, `grid` (T, H, W), and `data`, its token fields and per-sequence fields.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.invariance.user_dit import UserDiT

Sequence = dict[str, Any]
WAN = {"dim": 96, "heads": 12, "layers": 2, "freq": 32}  # the Wan configuration under test
EPS = 1e-6


def all_positions(grid: tuple[int, int, int]) -> Tensor:
    axes = [torch.arange(n) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)


def window_loss(parameters: dict[str, Tensor], model: str, window: list[list[Sequence]]) -> Tensor:
    """Mean over all sequences of an accumulation window of each one's mean over tokens."""
    sequences = [sequence for batch in window for sequence in batch]
    losses = [LOSSES[model](parameters, sequence) for sequence in sequences]
    return torch.stack(losses).mean()


def user_loss(parameters: dict[str, Tensor], sequence: Sequence) -> Tensor:
    tokens, condition = sequence["data"]["x"], sequence["data"]["c"]
    inputs = (tokens, all_positions(sequence["grid"]), condition.expand(len(tokens), -1))
    out = torch.func.functional_call(UserDiT(), parameters, inputs)
    return (out - torch.tanh(tokens)).square().mean(-1).mean()


# ---- Wan2.1, written from the original's description ------------------------------------------------------


def draw(*names: int | str) -> torch.Generator:
    digest = hashlib.sha256(json.dumps(names).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))


def wan_loss(parameters: dict[str, Tensor], sequence: Sequence) -> Tensor:
    """Flow matching of epoch 0, seed 0, shift 3, caption dropout 0.1."""
    p = {name.removeprefix("model."): value for name, value in parameters.items()}
    key, (frames, rows, columns) = sequence["key"], sequence["grid"]
    normal = torch.randn((), generator=draw("time", 0, 0, key), dtype=torch.float64).item()
    u = 1 / (1 + math.exp(-normal))
    sigma = 3 * u / (1 + 2 * u)
    dropped = torch.rand((), generator=draw("caption", 0, 0, key), dtype=torch.float64).item() < 0.1
    noise = torch.cat(
        [torch.randn(rows * columns, 64, generator=draw("noise", 0, 0, key, t)) for t in range(frames)]
    )
    x0 = sequence["data"]["latents"]
    s = torch.tensor(sigma).float()
    text = sequence["data"]["text"] * (0.0 if dropped else 1.0)
    x = ((1 - s) * x0 + s * noise).double()
    velocity = wan_velocity(p, x, sequence["grid"], torch.tensor(1000 * sigma).float(), text.double())
    return (velocity - (noise - x0)).square().mean(-1).mean()


def wan_velocity(
    p: dict[str, Tensor], x: Tensor, grid: tuple[int, int, int], t: Tensor, text: Tensor
) -> Tensor:
    def linear(name: str, value: Tensor) -> Tensor:
        return F.linear(value, p[f"{name}.weight"], p[f"{name}.bias"])

    half = WAN["freq"] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    embedded = torch.cat(((t.double() * rates).cos(), (t.double() * rates).sin()))
    time = linear("time_embedding.2", F.silu(linear("time_embedding.0", embedded)))
    modulation = linear("time_projection.1", F.silu(time)).view(6, -1)
    context = linear("text_embedding.2", F.gelu(linear("text_embedding.0", text), approximate="tanh"))
    x = F.linear(x, p["patch_embedding.weight"].flatten(1), p["patch_embedding.bias"])
    table = wan_rope(grid)
    for i in range(WAN["layers"]):
        block = f"blocks.{i}"
        e = p[f"{block}.modulation"][0] + modulation
        y = norm(x) * (1 + e[1]) + e[0]
        x = x + wan_attention(p, f"{block}.self_attn", y, y, table) * e[2]
        y = norm(x) * p[f"{block}.norm3.weight"] + p[f"{block}.norm3.bias"]
        x = x + wan_attention(p, f"{block}.cross_attn", y, context, None)
        y = norm(x) * (1 + e[4]) + e[3]
        y = linear(f"{block}.ffn.2", F.gelu(linear(f"{block}.ffn.0", y), approximate="tanh"))
        x = x + y * e[5]
    e = p["head.modulation"][0] + time
    out = linear("head.head", norm(x) * (1 + e[1]) + e[0])
    return out.view(len(x), 4, 16).transpose(1, 2).flatten(1)  # (ph, pw, C) -> (C, ph, pw)


def wan_attention(p: dict[str, Tensor], name: str, x: Tensor, y: Tensor, table: Tensor | None) -> Tensor:
    def project(which: str, value: Tensor) -> Tensor:
        out = F.linear(value, p[f"{name}.{which}.weight"], p[f"{name}.{which}.bias"])
        if which in "qk":  # over all heads together
            scale = (out.square().mean(-1, keepdim=True) + EPS).rsqrt()
            out = out * scale * p[f"{name}.norm_{which}.weight"]
        return out.view(len(out), WAN["heads"], -1)

    q, k, v = project("q", x), project("k", y), project("v", y)
    if table is not None:
        q, k = (torch.view_as_real(complex_pairs(t) * table).flatten(-2) for t in (q, k))
    out = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)))
    return F.linear(out[0].transpose(0, 1).flatten(1), p[f"{name}.o.weight"], p[f"{name}.o.bias"])


def complex_pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def wan_rope(grid: tuple[int, int, int]) -> Tensor:
    pairs = WAN["dim"] // WAN["heads"] // 2
    third = pairs // 3
    sizes = (pairs - 2 * third, third, third)
    positions = all_positions(grid).double()
    angles = [
        positions[:, i : i + 1] * 10000.0 ** (-torch.arange(n, dtype=torch.float64) / n)
        for i, n in enumerate(sizes)
    ]
    angle = torch.cat(angles, dim=1)
    return torch.polar(torch.ones_like(angle), angle)[:, None]


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


LOSSES = {"user": user_loss, "wan": wan_loss}
