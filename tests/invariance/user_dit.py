"""A DiT as somebody else would write it: plain torch, attention through scaled_dot_product_attention."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim // heads)

    def forward(self, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)  # [T, H, D]
        q, k = rotate(self.norm(q), angle), rotate(self.norm(k), angle)
        out = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)))
        return self.proj(out[0].transpose(0, 1).flatten(1))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor, angle: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x) * (1 + condition), angle)
        return x + self.mlp(self.norm2(x))


class UserDiT(nn.Module):
    """tokens [T, C], positions [T, 3], condition [T, K] -> [T, C]."""

    def __init__(self, channels: int = 6, dim: int = 48, heads: int = 12, depth: int = 2) -> None:
        super().__init__()
        self.checkpointing = False
        self.embed, self.condition = nn.Linear(channels, dim), nn.Linear(4, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.out = nn.Linear(dim, channels)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        rates = torch.tensor([1.0, 0.3], dtype=tokens.dtype)
        angle = (
            positions.to(tokens.dtype) @ torch.tensor([[0.7], [0.2], [0.05]], dtype=tokens.dtype)
        ) * rates
        x, condition = self.embed(tokens), self.condition(condition)
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, angle, condition, use_reentrant=False)
            else:
                x = block(x, angle, condition)
        return self.out(x)


def rotate(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)  # [T, H, D/2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
