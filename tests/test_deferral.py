"""`planner.defer`: where even waves do not fit, named sequences wait for the next batch, and none is lost."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.distributed import run_distributed
from tests.invariance.dealt import OneSource
from tests.invariance.subject import MemorySource
from tests.test_waves import Module, sequences
from zellige_lightning import ZelligeDataModule, ZelligeStrategy
from zellige_lightning.position import deferred_in

CAP_MIB = 6  # holds the largest sample, not a whole batch


def train(rank: int, folder: str, max_steps: int, resume: bool) -> dict[str, Any]:
    world = int(os.environ["WORLD_SIZE"])
    strategy = ZelligeStrategy(
        planner={"defer": True, "max_waves": 1},
        memory_cap_gib=CAP_MIB / 1024,
        profiler={"repeats": 1, "mixed_plans": 0},
    )
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=world, max_epochs=2, max_steps=max_steps,
        precision="64-true", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)],
    )  # fmt: skip
    checkpoint = Path(folder) / "last.ckpt"
    data = ZelligeDataModule(OneSource(MemorySource(sequences(), ("x",))), tokens_per_batch=420)
    trainer.fit(Module().double(), data, ckpt_path=checkpoint if resume else None)
    (monitor,) = (c for c in trainer.callbacks if hasattr(c, "records"))
    return {
        "keys": [[s.key for s in record.batch.sequences] for record in monitor.records],
        "waiting": [key for key, _ in strategy._deferred],
    }


def test_what_waits_comes_first_in_the_next_batch_also_after_a_resume(tmp_path: Path) -> None:
    whole = run_distributed(train, 2, str(tmp_path / "whole"), -1, False, group=False)
    assert whole[0] == whole[1]
    trained, waiting = whole[0]["keys"], whole[0]["waiting"]
    counted = Counter(key for keys in trained for key in keys) + Counter(waiting)
    assert counted == Counter({s["key"]: 2 for s in sequences()}), "two epochs see every sample twice"
    first = run_distributed(train, 2, str(tmp_path / "parts"), 1, False, group=False)
    assert first[0]["waiting"], "the cap of this test lets the whole batch fit: nothing waits"
    rest = run_distributed(train, 2, str(tmp_path / "parts"), -1, True, group=False)
    assert first[0]["keys"] + rest[0]["keys"] == trained
    assert set(first[0]["waiting"]) <= set(rest[0]["keys"][0])


def test_a_checkpoint_without_deferral_has_none() -> None:
    assert deferred_in({}) == deferred_in({"zellige": {"position": {"epoch": 0, "delivered": 1}}}) == ()
