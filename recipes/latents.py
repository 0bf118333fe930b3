"""Data that is encoded already: folders of latents and text embeddings."""

from __future__ import annotations

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from zellige_lightning.recipes.wan21.store import LatentStore
from zellige_lightning.sources import Sample


class LatentDataModule(LightningDataModule):
    """Serves latent stores to `ZelligeDataModule`, which reads token ranges of them.

    Args:
        folder: store of the training samples.
        held_out: store of the samples that validation uses.
    """

    def __init__(self, folder: str, held_out: str | None = None) -> None:
        super().__init__()
        self.folders = {"train": folder} | ({"held_out": held_out} if held_out is not None else {})
        self._stores: dict[str, LatentStore] = {}

    def setup(self, stage: str | None = None) -> None:
        """Raises: DataError for a store that is missing or damaged."""
        self._stores = {split: LatentStore(folder) for split, folder in self.folders.items()}

    def train_dataloader(self) -> DataLoader[Sample]:
        return _loader(self._stores["train"])

    def val_dataloader(self) -> DataLoader[Sample] | list[DataLoader[Sample]]:
        return _loader(self._stores["held_out"]) if "held_out" in self._stores else []


def _loader(store: LatentStore) -> DataLoader[Sample]:
    return DataLoader(store, batch_size=None)  # type: ignore[arg-type]
