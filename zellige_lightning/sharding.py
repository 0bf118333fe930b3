"""FSDP2 on a user's module: every layer is a unit, and the LightningModule itself holds the rest.

The module is the root, so a step has to come through its `__call__`: then whatever a `training_step` touches
is gathered, however the user has nested it. Initial values are those of rank 0, as under DDP, and only one
layer is whole at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from zellige_lightning.errors import ConfigError
from zellige_lightning.mixin import CoalescedAttentionMixin
from zellige_lightning.trial import keep_template, layer_list


def shard(module: LightningModule, mesh: DeviceMesh, device: torch.device, template_layers: int) -> None:
    """Shard the parameters of `module` over the ranks of `mesh`. Does nothing to a module that is sharded. A
    collective.

    Args:
        device: of this rank.
        template_layers: layers of an unsharded copy that is kept in host memory for checks and measurements;
            see `keep_template`.

    Raises:
        ConfigError: parameters on the meta device that nothing initializes.
    """
    if isinstance(module, FSDPModule):
        reshard(module)
        return
    layers = _layers(module)
    keep_template(module, _template(module, layers, template_layers))
    for layer in layers:
        _prepare(module, layer, device)
        fully_shard(layer, mesh=mesh)
    _prepare(module, module, device)
    fully_shard(module, mesh=mesh)


def reshard(module: nn.Module) -> None:
    """After a forward without backward the root is still whole; only its shards can be read or written."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _layers(module: LightningModule) -> list[nn.Module]:
    """The units besides the root; none where the module has no list of equal layers."""
    if not isinstance(module, CoalescedAttentionMixin):
        return []
    layers = layer_list(module, list(module.attention_modules()))
    return list(layers) if layers is not None else []


def _template(module: LightningModule, layers: list[nn.Module], most: int) -> LightningModule:
    """A copy of the module with as few layers as measurements need, on the CPU."""
    memo: dict[int, Any] = {}
    if isinstance(module, CoalescedAttentionMixin) and layers:
        kept = layers if len(layers) <= most else layers[:2]
        full = layer_list(module, list(module.attention_modules()))
        memo[id(full)] = nn.ModuleList([copy.deepcopy(layer) for layer in kept])
    template = copy.deepcopy(module, memo)
    materialize(template, template, torch.device("cpu"))
    return template.to("cpu")


def _prepare(module: LightningModule, unit: nn.Module, device: torch.device) -> None:
    """The unit's own values, those of rank 0, on the device."""
    materialize(module, unit, device)
    for tensor in _plain_tensors(unit):
        tensor.data = tensor.data.to(device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(tensor.data, src=0)


def _plain_tensors(unit: nn.Module) -> list[Tensor]:
    return [t for t in (*unit.parameters(), *unit.buffers()) if not isinstance(t, DTensor)]


@torch.no_grad()
def materialize(module: LightningModule, unit: nn.Module, device: torch.device) -> None:
    """Give the parameters and buffers of `unit` that are on the meta device memory and initial values.

    A LightningModule may say how, by a method `init_weights(submodule)` that sets what the submodule holds
    itself; else the submodule's own `reset_parameters()` does.

    Raises:
        ConfigError: a submodule with neither.
    """
    initialize = getattr(module, "init_weights", None)
    for name, submodule in unit.named_modules():
        own = (*submodule.parameters(recurse=False), *submodule.buffers(recurse=False))
        if not any(tensor.is_meta for tensor in own):
            continue
        submodule.to_empty(device=device, recurse=False)
        if callable(initialize):
            initialize(submodule)
        elif callable(reset := getattr(submodule, "reset_parameters", None)):
            reset()
        else:
            raise ConfigError(
                f"module {name!r} ({type(submodule).__name__}) is on the meta device, nothing initializes it",
                fix="give it `reset_parameters()`, or the LightningModule `init_weights(submodule)`",
            )


@contextmanager
def without_moving(module: LightningModule | None) -> Iterator[None]:
    """Leave a module on the meta device there, where Lightning would move it to the host: it was refused."""
    if module is None or not any(parameter.is_meta for parameter in module.parameters()):
        yield
        return
    module.__dict__["cpu"] = lambda: module
    try:
        yield
    finally:
        del module.__dict__["cpu"]


def trained_bytes(module: nn.Module) -> int:
    """Of all parameters that are trained, whole, whatever this rank holds of them."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Of what this rank holds of tensors that may be sharded."""
    return sum(t.numel() * t.element_size() for t in map(_local, tensors))


def gathered_bytes(module: nn.Module) -> int:
    """Most that a sharded module holds besides its shards; 0 if it is not sharded."""
    sizes = [
        sum(p.numel() * p.element_size() for p in unit.parameters())
        for unit in module.modules()
        if isinstance(unit, FSDPModule)
    ]
    root, *layers = sizes or [0]
    return gathered_at_once(root, layers)


def gathered_at_once(module: int, layers: list[int]) -> int:
    """Of the whole module and of each layer, in bytes of parameters: what belongs to no layer; the parameters
    of two layers, of which the next is gathered ahead; gradients of one, and as much on their way."""
    return module - sum(layers) + 4 * max(layers, default=0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
