"""M_cap = M_usable - M_base (paper, Sec. IV-B), with its parts, so that a user sees where the memory goes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule

from zellige_lightning.errors import ConfigError
from zellige_lightning.sharding import gathered_bytes, held_bytes, trained_bytes

_DEVICE_SHARE = 0.94  # of a GPU's memory; the rest is fragmentation
_HOST_SHARE = 0.8  # of a machine's memory; the rest is for everybody else
_OPTIMIZER_MOMENTS = 2  # as of AdamW; it has none yet when a fit starts


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of one rank.

    Args:
        usable: M_usable: what torch may take here. On a GPU communicators and the context are out of it.
        elsewhere: taken by communicators, the context and other programs, for the record.
        parameters: there already, with buffers.
        gradients, optimizer: of the trained parameters; gradients stay during the next forward.
        step: of a step whatever its sequences.
        gathered: of a sharded model: parameters and gradients that are whole for a while.
    """

    usable: int
    elsewhere: int
    parameters: int
    gradients: int
    optimizer: int
    step: int
    gathered: int = 0

    @property
    def base(self) -> int:
        """M_base."""
        return self.parameters + self.gradients + self.optimizer + self.step + self.gathered

    @property
    def cap_mib(self) -> int:
        """M_cap; not positive where nothing is left."""
        return (self.usable - self.base) // 2**20

    def __str__(self) -> str:
        names = ("parameters", "gradients", "optimizer", "step", *(("gathered",) if self.gathered else ()))
        parts = " - ".join(f"{name} {_gib(getattr(self, name))}" for name in names)
        outside = f", {_gib(self.elsewhere)} taken outside" if self.elsewhere else ""
        return f"M_cap {_gib(self.usable - self.base)} = usable {_gib(self.usable)} - {parts} (GiB{outside})"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f}"


def memory_budget(
    module: LightningModule,
    device: torch.device,
    num_local_ranks: int,
    step_bytes: int,
    kept_gradient_bytes: int = 0,
) -> MemoryBudget:
    """What this rank has, once its model is on the device and its process groups are warm.

    Args:
        kept_gradient_bytes: of whole gradients of a sharded model, between the backwards of a window.
    """
    trained = held_bytes(p for p in module.parameters() if p.requires_grad)
    usable, elsewhere = usable_bytes(device, num_local_ranks), 0
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        elsewhere = total - free - torch.cuda.memory_reserved(device)
        parameters = torch.cuda.memory_allocated(device)
    else:
        parameters = held_bytes((*module.parameters(), *module.buffers()))
    gathered = gathered_bytes(module) + kept_gradient_bytes
    optimizer = _OPTIMIZER_MOMENTS * trained
    return MemoryBudget(usable, elsewhere, parameters, trained, optimizer, step_bytes, gathered)


def usable_bytes(device: torch.device, num_local_ranks: int) -> int:
    """What torch may take on one rank: most of what its device has free, or its part of the host's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(_DEVICE_SHARE * (free + torch.cuda.memory_reserved(device)))
    return int(_HOST_SHARE * host_memory() / max(1, num_local_ranks))


def host_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def require_room(module: LightningModule, device: torch.device, num_local_ranks: int) -> None:
    """Ask before anything is put on the device, not when it runs out.

    Raises:
        ConfigError: parameters, gradients and the states of an Adam do not fit whole on one rank.
    """
    needed = (2 + _OPTIMIZER_MOMENTS) * trained_bytes(module)
    usable = usable_bytes(device, num_local_ranks)
    if needed > usable:
        count = sum(p.numel() for p in module.parameters() if p.requires_grad)
        raise ConfigError(
            f"{count / 1e9:.1f} billion parameters, their gradients and Adam's states take"
            f" {needed / 2**30:.0f} GiB on every rank, which has {usable / 2**30:.0f} GiB",
            fix="shard them: strategy=zellige_fsdp2",
        )
