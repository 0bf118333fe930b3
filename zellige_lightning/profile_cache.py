"""A measured profile belongs to one job: what it depends on, and when it may be used again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import lightning
import torch
from lightning.pytorch import LightningModule

from zellige_lightning.agreement import Agreement
from zellige_lightning.errors import ProfileError
from zellige_lightning.placement import Bucket, ParallelConfig, Topology
from zellige_lightning.planner import ProfileTable


def fingerprint_of(
    module: LightningModule,
    buckets: tuple[Bucket, ...],
    configs: tuple[ParallelConfig, ...],
    topology: Topology,
    precision: str,
    engine: str,
    device: torch.device,
) -> dict[str, str | int | float]:
    """What a price depends on. A profile with another fingerprint is stale, never close enough.

    Args:
        engine: settings of the engine on which prices depend, and its kernel.
    """
    shapes = "|".join(f"{name}:{tuple(p.shape)}:{p.dtype}" for name, p in module.named_parameters())
    return {
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "precision": precision,
        "engine": engine,
        "model": f"{type(module).__name__}-{short_digest(shapes + repr(module))}",
        "topology": short_digest(str(topology.node_of)),
        "world_size": topology.world_size,
        "buckets": short_digest("|".join(f"{b.name}:{b.grid}" for b in buckets)),
        "configs": short_digest("|".join(map(str, configs))),
    }


def short_digest(text: str) -> str:
    """Enough of a digest to name a file."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def load_or_measure(
    agreement: Agreement,
    path: Path,
    fingerprint: Mapping[str, str | int | float],
    measure: Callable[[], ProfileTable],
    say: Callable[[str], None],
    anew: bool = False,
) -> ProfileTable:
    """Rank 0's file where it fits this job, else a fresh measurement, which rank 0 writes. Rank 0's table is
    everybody's.

    Args:
        anew: measure whatever the file holds.
    """

    def load() -> str:
        if anew or not path.is_file():
            return ""
        try:
            return ProfileTable.load(path, fingerprint).to_json()
        except ProfileError as error:
            say(f"the profile in {path.name} is not used, it is measured anew: {error.message}")
            return ""

    if text := agreement.on_first(load):
        say(f"profile loaded from {path.name}")
        return ProfileTable.from_json(text)
    table = agreement.together(measure)

    def keep() -> str:
        try:
            table.save(path)
        except ProfileError as error:  # a full or read-only cache costs a measurement next time, not this run
            say(f"the measured profile is not kept: {error.message}")
        return table.to_json()

    return ProfileTable.from_json(agreement.on_first(keep))
