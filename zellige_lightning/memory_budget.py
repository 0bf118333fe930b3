"""M_cap = M_usable - M_base (paper, Sec. IV-B), with its parts, so that a user sees where the memory goes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule

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
    """

    usable: int
    elsewhere: int
    parameters: int
    gradients: int
    optimizer: int
    step: int

    @property
    def base(self) -> int:
        """M_base."""
        return self.parameters + self.gradients + self.optimizer + self.step

    @property
    def cap_mib(self) -> int:
        """M_cap; not positive where nothing is left."""
        return (self.usable - self.base) // 2**20

    def __str__(self) -> str:
        names = ("parameters", "gradients", "optimizer", "step")
        parts = " - ".join(f"{name} {_gib(getattr(self, name))}" for name in names)
        outside = f", {_gib(self.elsewhere)} taken outside" if self.elsewhere else ""
        return f"M_cap {_gib(self.usable - self.base)} = usable {_gib(self.usable)} - {parts} (GiB{outside})"


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f}"


def memory_budget(
    module: LightningModule, device: torch.device, num_local_ranks: int, step_bytes: int
) -> MemoryBudget:
    """What this rank has, once its model is on the device and its process groups are warm."""
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device)
        usable, elsewhere = int(_DEVICE_SHARE * (free + held)), total - free - held
        parameters = torch.cuda.memory_allocated(device)
    else:
        host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        usable, elsewhere = int(_HOST_SHARE * host / max(1, num_local_ranks)), 0
        parameters = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    return MemoryBudget(usable, elsewhere, parameters, trained, _OPTIMIZER_MOMENTS * trained, step_bytes)
