"""A script that lets Lightning start its processes: `python -m tests.lightning.launched METHOD FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from tests.lightning.toy import batches_of, callback_of, flat, make_data, make_toy
from zellige_lightning import ZelligeStrategy
from zellige_lightning.monitor import MakespanMonitor


class Report(Callback):
    """Writes down what rank 0 has trained; the process that started the others never trains."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            records = callback_of(trainer, MakespanMonitor).records
            found = {
                "parameters": flat(pl_module),
                "batches": batches_of(records),
                "world": trainer.world_size,
            }
            Path(self.path).write_text(json.dumps(found))


def main(method: str, path: str) -> None:
    strategy = ZelligeStrategy(start_method=method, profiler={"repeats": 1, "mixed_plans": 0})
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, limit_train_batches=3,
        limit_val_batches=0, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[Report(path)],
    )  # fmt: skip
    trainer.fit(make_toy(), make_data())


if __name__ == "__main__":
    main(*sys.argv[1:])
