"""Checkpoints of which the last one is that of the last step."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from zellige_lightning.sharded_checkpoint import put_back


class StepCheckpoint(ModelCheckpoint):
    """Lightning's callback, which ends with the last step that `every_n_train_steps` divides: what was
    trained since then would be lost. Here the end of training is saved as well. Arguments are Lightning's."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        if self.dirpath is not None:
            put_back(Path(self.dirpath))
        found: set[str] = super()._find_last_checkpoints(trainer)
        return found
