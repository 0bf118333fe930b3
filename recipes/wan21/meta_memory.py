"""What a step of Wan2.1 keeps in memory, found without memory or GPU: small depths of the model run on fake
tensors of full width, and every storage is counted from its first use to its end."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zellige_lightning.batch import positions_of
from zellige_lightning.planner import ModelGeometry
from zellige_lightning.recipes.wan21.config import WanConfig
from zellige_lightning.recipes.wan21.model import WanModel

MODES = ("none", "full", "full+anchors", "full+all")
_GRIDS = ((16, 32, 32), (32, 32, 32))  # tokens enough that the peak is where activations are, not gradients


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make, until they are freed.

    Attributes:
        now, peak: bytes alive, and the most that were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


@dataclass(frozen=True)
class StepBytes:
    """Held from forward to backward, and the peak above that, of one step."""

    held: int
    above: int


def step_bytes(
    config: WanConfig, grid: tuple[int, int, int], *, checkpointing: bool, mixed: bool
) -> StepBytes:
    """One sample of `grid` through all layers of `config`.

    Args:
        mixed: bf16 autocast over fp32 weights; otherwise everything is bf16.
    """
    tokens = grid[0] * grid[1] * grid[2]
    with FakeTensorMode(), _made_in(torch.float32 if mixed else torch.bfloat16):
        model = WanModel(config, activation_checkpointing=checkpointing)
        arguments = (
            *(torch.randn(tokens, 64), positions_of(range(tokens), grid)),
            *(torch.zeros(tokens, dtype=torch.int64), torch.rand(1)),
            *(torch.randn(1, config.text_len, config.text_dim), [tokens]),
        )
        with LiveBytes() as live:
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = model(*arguments).square().mean()
            held = live.now
            loss.backward()
            return StepBytes(held, live.peak - held)


@contextmanager
def _made_in(dtype: torch.dtype) -> Iterator[None]:
    """Tensors that are made here have that type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def geometry_of(config: WanConfig, mode: str, *, mixed: bool) -> ModelGeometry:
    """The coefficients of the memory model: bytes per token, by the difference between two lengths, of all
    layers, by the difference between two depths.

    Args:
        mode: what blocks keep for backward: `none` recomputes nothing; `full` recomputes each block, all but
            the attention of split (`full+anchors`) or of all sequences (`full+all`).
    """
    rows = {}
    for depth in (1, 2):
        shallow = replace(config, num_layers=depth)
        few, many = (step_bytes(shallow, g, checkpointing=mode != "none", mixed=mixed) for g in _GRIDS)
        difference = _tokens(_GRIDS[1]) - _tokens(_GRIDS[0])
        rows[depth] = (many.held - few.held) / difference, (many.above - few.above) / difference
    per_layer = rows[2][0] - rows[1][0]
    saved = config.num_layers * config.num_heads * (config.head_dim * 2 + 4)  # output and log-sum-exp
    resident = rows[1][0] + per_layer * (config.num_layers - 1) + (saved if mode == "full+all" else 0)
    return ModelGeometry(
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        element_bytes=2,
        resident_bytes_per_token=max(1, round(resident)),
        transient_bytes_per_token=max(1, round(max(row[1] for row in rows.values()))),
        bytes_per_sequence=0,
        split_bytes_per_token=saved if mode == "full+anchors" else 0,
    )


def _tokens(grid: tuple[int, int, int]) -> int:
    return grid[0] * grid[1] * grid[2]
