"""Faults that placement could introduce. Each must turn the invariance test red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

import zellige_lightning.batch as batch_module
from zellige_lightning.batch import RankBatch
from zellige_lightning.engine import layout as layout_module
from zellige_lightning.engine.keys import KeyAxes
from zellige_lightning.placement import schedule as schedule_module
from zellige_lightning.recipes.wan21.flow import FlowMatching

Undo = Callable[[], None]


def _patch(owner: Any, name: str, value: Any) -> Undo:
    original = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, original)


def shards_swapped() -> Undo:
    """The first two positions of a rank set hold each other's tokens, and say so to nobody."""
    original = batch_module.positions_of

    def swapped(tokens: range, grid: tuple[int, int, int]) -> Tensor:
        whole = original(range(grid[0] * grid[1] * grid[2]), grid)
        size = len(whole)
        if len(tokens) == size or dist.get_rank() > 1:
            return original(tokens, grid)
        return whole.roll(size // 2, 0)[tokens.start : tokens.stop]

    return _patch(batch_module, "positions_of", swapped)


def world_factor_dropped() -> Undo:
    original = RankBatch.reduce
    return _patch(
        RankBatch, "reduce", lambda self, per_token: original(self, per_token) / self.plan.world_size
    )


def key_gradients_not_reduced() -> Undo:
    """Each position keeps its own part of dK/dV instead of the sum over the query axis."""

    def keep(self: KeyAxes, reducing: Any) -> Tensor:
        own = self._layout.coordinates[0]
        return reducing.wait().unflatten(0, (self._config.q, -1))[own]

    return _patch(KeyAxes, "_reduced", keep)


def rope_restarts_per_shard() -> Undo:
    original = batch_module.positions_of
    return _patch(batch_module, "positions_of", lambda tokens, grid: original(range(len(tokens)), grid))


def noise_seeded_by_rank() -> Undo:
    original = FlowMatching._frame_noise

    def noise(self: FlowMatching, epoch: int, key: str, frame: int, per_frame: int) -> Tensor:
        return original(self, epoch, f"{key}-{dist.get_rank()}", frame, per_frame)

    return _patch(FlowMatching, "_frame_noise", noise)


def tail_token_lost() -> Undo:
    """The last token of a sequence that its degree does not divide is left out of every shard."""
    original = schedule_module.shard

    def shard(num_tokens: int, position: int, degree: int) -> range:
        return original(num_tokens - (num_tokens % degree > 0), position, degree)

    undo = [_patch(module, "shard", shard) for module in (schedule_module, layout_module)]

    def restore() -> None:
        for one in undo:
            one()

    return restore


MUTATIONS: dict[str, Callable[[], Undo]] = {
    f.__name__: f
    for f in (
        shards_swapped,
        world_factor_dropped,
        key_gradients_not_reduced,
        rope_restarts_per_shard,
        noise_seeded_by_rank,
        tail_token_lost,
    )
}


def apply(name: str) -> Undo:
    return MUTATIONS[name]()
