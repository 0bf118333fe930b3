"""The weights that training starts from: published ones, an earlier stage's, or random ones."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

from zellige_lightning.agreement import Agreement
from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.weights import load_weights

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# In a repository of either layout: neither the VAE's nor the text encoder's.
_HUB_FILES = ["config.json", "diffusion_pytorch_model*", "transformer/*"]
_TIMEOUT = timedelta(hours=6)  # a large model from a slow disk, or a download


def find_weights(name: str, *, download: bool = True) -> Path:
    """A local file or folder, or the local copy of a repository of the Hugging Face hub.

    Args:
        download: fetch from the hub what is not on this machine.

    Raises:
        DataError: nothing of that name, or the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not _HUB_NAME.fullmatch(name):
        raise DataError(f"there are no weights at {name!r}", fix="set model.weights to a file or folder")
    try:
        from huggingface_hub import snapshot_download

        folder: str = snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=not download)
        return Path(folder)
    except ImportError as error:
        raise DataError(
            f"weights {name!r} are no local folder, and huggingface_hub is not installed",
            fix="give a folder, or install the extra `wan`",
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(
            f"weights {name!r} are neither a local folder nor to be had from the hub:"
            f" {str(error).strip().splitlines()[0]}",
            fix="correct model.weights; without a network, give a folder that was downloaded elsewhere",
        ) from error


def start_from(model: nn.Module, name: str, device: torch.device, local_rank: int) -> None:
    """Fill `model`, whose parameters may lie on the meta device, on every rank. A collective: whatever fails
    on one rank is raised on all.

    Args:
        name: see `find_weights`. One rank of each machine downloads, the others wait for it.
        device: where parameters from the meta device go.

    Raises:
        DataError: no such weights, or weights that do not fit the model, see `load_weights`.
    """
    agreement = Agreement(_TIMEOUT)
    try:
        agreement.together(lambda: find_weights(name) if local_rank == 0 else None)
        agreement.together(lambda: load_weights(model, find_weights(name, download=False), device))
    finally:
        agreement.close()
