"""How single-file checkpoints are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from zellige_lightning.durable import atomically


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's own stages a checkpoint in the temporary folder and copies it over the last good one, which
    a full disk then destroys, and says nothing of a folder that it may not write to."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Raises: DataError if the disk is full or read-only."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            atomically(Path(path), lambda file: torch.save(checkpoint, file))
