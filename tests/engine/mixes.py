"""Mixes of sequences under given placements, run on ranks and put together again."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.oracle import Dense, dense_attention
from zellige_lightning.engine import CoalescedAttentionEngine, ProcessGroupCache
from zellige_lightning.placement import ParallelConfig, PlacementOption, RankSchedule, build_schedule, whole

Result = tuple[Tensor, Tensor, Tensor, Tensor]  # out, dq, dk, dv


@dataclass(frozen=True)
class Mix:
    """Sequences of given lengths under given placements, with tensors drawn from the seed."""

    world_size: int
    lengths: tuple[int, ...]
    options: tuple[PlacementOption, ...]
    heads: int = 12
    dim: int = 8
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def __str__(self) -> str:
        placed = zip(self.lengths, self.options, strict=True)
        return f"{self.world_size} ranks: " + ", ".join(f"{n} {o.config} on {o.ranks}" for n, o in placed)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """q, k, v, dout `[4, L, H, D]` of each sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = self.heads, self.dim
        return [
            torch.randn(4, n, *shape, generator=generator, dtype=torch.float64).to(self.dtype)
            for n in self.lengths
        ]

    @cached_property
    def dense(self) -> list[Dense]:
        return [dense_attention(*x) for x in self.tensors]

    @property
    def rank_sets(self) -> set[tuple[int, ...]]:
        return {option.ranks for option in self.options if not option.config.is_whole}

    def schedule(self, rank: int) -> RankSchedule:
        return build_schedule(self.options, self.lengths, rank, self.world_size)

    def local(self, rank: int) -> Tensor:
        """q, k, v, dout `[4, T, H, D]` of a rank, packed."""
        parts = [
            self.tensors[s.sequence][:, s.tokens.start : s.tokens.stop] for s in self.schedule(rank).segments
        ]
        return torch.cat([torch.zeros(4, 0, self.heads, self.dim, dtype=self.dtype), *parts], dim=1)

    def worst_error(self, rank: int, packed: Rows[Tensor]) -> float:
        """Largest deviation of a rank's rows, relative to the largest value of their sequence; NaN if any
        is NaN."""
        schedule, errors = self.schedule(rank), [torch.zeros((), dtype=torch.float64)]
        for segment, start in zip(schedule.segments, schedule.offsets, strict=False):
            dense = self.dense[segment.sequence]
            for got, true in zip(packed, (dense.out, dense.dq, dense.dk, dense.dv), strict=True):
                off = got[start : start + len(segment)] - true[segment.tokens.start : segment.tokens.stop]
                if len(segment):
                    errors.append(off.abs().max() / true.abs().max().clamp_min(1e-30))
        return float(torch.stack(errors).max())

    def dense_in_own_dtype(self) -> list[Result]:
        """out, dq, dk, dv `[L, H, D]` of plain attention in the precision of the mix."""
        results = []
        for q, k, v, dout in (x.transpose(1, 2)[:, None] for x in self.tensors):
            q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
            out = F.scaled_dot_product_attention(q, k, v)
            gradients = torch.autograd.grad(out, (q, k, v), dout)
            results.append(tuple(x[0].transpose(0, 1) for x in (out.detach(), *gradients)))
        return results  # type: ignore[return-value]

    def gather(self, results: Rows[Rows[Tensor]]) -> list[list[Tensor]]:
        """Packed results of every rank -> those of each sequence. Rows that no rank holds stay NaN."""
        whole = [[torch.full_like(x[0], torch.nan) for _ in results[0]] for x in self.tensors]
        for rank, packed in enumerate(results):
            schedule = self.schedule(rank)
            for segment, start in zip(schedule.segments, schedule.offsets, strict=False):
                for into, rows in zip(whole[segment.sequence], packed, strict=True):
                    into[segment.tokens.start : segment.tokens.stop] = rows[start : start + len(segment)]
        return whole


def attend(engine: CoalescedAttentionEngine, mix: Mix, rank: int) -> Result:
    """One attention call and its backward, under the schedule of `mix`."""
    engine.install(mix.schedule(rank))
    q, k, v, dout = mix.local(rank)
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = engine(q, k, v)
    out.backward(dout)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return out.detach(), q.grad, k.grad, v.grad


def make_engine(
    rank_sets: set[tuple[int, ...]], timeout_s: float = 20.0, transport: str = "groups"
) -> CoalescedAttentionEngine:
    groups = ProcessGroupCache(timedelta(seconds=timeout_s), transport=transport)
    groups.prepare(rank_sets)
    return CoalescedAttentionEngine(groups)


def degrees(largest: int, heads: int = 12, further: tuple[int, ...] = ()) -> list[ParallelConfig]:
    """All split (q, h, k) of degree up to `largest`, and of the further degrees, in which h divides the
    heads."""
    wanted = {*range(2, largest + 1), *further}
    top = range(1, max(wanted) + 1)
    return [
        ParallelConfig(q, h, k)
        for q in top
        for h in top
        for k in top
        if q * h * k in wanted and heads % h == 0
    ]


def every_configuration(world: int, heads: int, dtype: torch.dtype, seed: int = 0) -> Mix:
    """Each (q, h, k) that `world` ranks and the heads allow, on a rank set of its own choice."""
    rng = random.Random(seed)
    configs = degrees(world, heads)
    options = [PlacementOption(c, tuple(sorted(rng.sample(range(world), c.degree)))) for c in configs]
    lengths = tuple(rng.choice([3, 40, 61, 130]) for _ in options)
    return Mix(world, lengths, tuple(options), heads, dtype=dtype, seed=seed)


def random_mix(rng: random.Random, world_size: int, num_sequences: int, heads: int = 12, dim: int = 8) -> Mix:
    """Rank sets overlap freely, lengths may be smaller than the degree, some ranks may be idle."""
    configs = degrees(world_size, heads)
    busy = rng.sample(range(world_size), rng.randint(2, world_size))
    options = []
    for _ in range(num_sequences):
        config = rng.choice([c for c in configs if c.degree <= len(busy)])
        ranks = tuple(sorted(rng.sample(busy, config.degree)))
        # the same placement twice in a row now and then, so that Ulysses sequences coalesce
        options.append(rng.choice([PlacementOption(config, ranks), whole(rng.choice(busy)), *options[-2:]]))
    lengths = tuple(rng.choice([1, 2, 5, 33, 64, 64, 100]) for _ in options)
    return Mix(world_size, lengths, tuple(options), heads, dim, seed=rng.getrandbits(30))
