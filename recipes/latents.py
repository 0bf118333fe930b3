"""Data that is encoded already: folders of latents and text embeddings."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.encoded_store import EncodedStore, identity, open_store
from zellige_lightning.recipes.wan21.store import LatentStore
from zellige_lightning.sources import Sample


class LatentDataModule(LightningDataModule):
    """Serves latent stores to `ZelligeDataModule`, which reads token ranges of them.

    Args:
        folder: store of the training samples, as `zellige-encode` or `build_store` wrote it.
        held_out: store of the samples that validation uses.
    """

    def __init__(self, folder: str, held_out: str | None = None) -> None:
        super().__init__()
        self.folders = {"train": folder} | ({"held_out": held_out} if held_out is not None else {})
        self._stores: dict[str, LatentStore | EncodedStore] = {}
        self._trained_with: dict[str, Any] | None = None

    def setup(self, stage: str | None = None) -> None:
        """Raises: DataError for a store that is missing or damaged, or two that were encoded differently."""
        self._stores = {split: open_store(folder) for split, folder in self.folders.items()}
        for split, store in self._stores.items():
            _compare(identity(self._stores["train"]), identity(store), f"the {split} samples")
        if self._trained_with is not None:
            _compare(self._trained_with, identity(self._stores["train"]), "the samples of this run")

    def state_dict(self) -> dict[str, Any]:
        """What the latents mean, so that training cannot go on with those of another VAE."""
        return {"encoded_by": identity(self._stores["train"])} if self._stores else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises: DataError if the checkpoint was trained on latents of another VAE or text encoder."""
        self._trained_with = state_dict.get("encoded_by")
        if self._stores and self._trained_with is not None:
            _compare(self._trained_with, identity(self._stores["train"]), "the samples of this run")

    def train_dataloader(self) -> DataLoader[Sample]:
        return _loader(self._stores["train"])

    def val_dataloader(self) -> DataLoader[Sample] | list[DataLoader[Sample]]:
        return _loader(self._stores["held_out"]) if "held_out" in self._stores else []


def _compare(expected: dict[str, Any], found: dict[str, Any], what: str) -> None:
    different = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    if different:
        text = "; ".join(
            f"{name}: {found.get(name)!r} instead of {expected.get(name)!r}" for name in different
        )
        raise DataError(
            f"{what} were encoded by another VAE or text encoder ({text})",
            fix="encode all samples of a model with the same VAE and text encoder",
        )


def _loader(store: LatentStore | EncodedStore) -> DataLoader[Sample]:
    return DataLoader(store, batch_size=None)  # type: ignore[arg-type]
