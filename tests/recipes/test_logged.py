"""What a run of the recipe logs: losses by bucket that add up to the loss, and figures of throughput."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from tests.distributed import run_distributed
from tests.lightning.toy import callback_of, make_trainer, model_prices
from tests.recipes.test_sampler import data, trained_module
from zellige_lightning import ZelligeStrategy
from zellige_lightning.errors import ConfigError
from zellige_lightning.monitor import MakespanMonitor
from zellige_lightning.recipes.wan21.config import CONFIGS
from zellige_lightning.recipes.wan21.flops import forward_flops, model_flops
from zellige_lightning.recipes.wan21.throughput import Throughput, peak_of

STEPS, PEAK = 3, 0.25


def fit(rank: int, folder: str) -> list[dict[str, Any]]:
    """A few steps; the buckets of each global batch."""
    model_prices()
    trainer = make_trainer(
        ZelligeStrategy(planner={"memory_cap_gib": 1.0}),
        max_steps=STEPS, max_epochs=-1, logger=CSVLogger(folder, "", ""),
        callbacks=[Throughput(PEAK)],
    )  # fmt: skip
    trainer.fit(trained_module(), data())
    records = callback_of(trainer, MakespanMonitor).records
    return [dict(Counter(s.bucket.name for s in r.batch.sequences)) for r in records]


def rows_of(folder: Path) -> list[dict[str, float]]:
    with (folder / "metrics.csv").open(newline="") as file:
        found = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [row for row in found if "loss" in row]


@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_and_throughput(world_size: int, tmp_path: Path) -> None:
    batches, *others = run_distributed(fit, world_size, str(tmp_path), group=False)
    assert all(other == batches for other in others)
    rows = rows_of(tmp_path)
    sizes = {"image-1x4x4": 16, "image-1x2x4": 8, "video-5x4x6": 120}
    for row, seen in zip(rows, batches, strict=True):
        losses = {name.removeprefix("loss/"): v for name, v in row.items() if name.startswith("loss/")}
        assert set(losses) == set(seen)
        mean = sum(losses[b] * n for b, n in seen.items()) / sum(seen.values())
        assert mean == pytest.approx(row["loss"], rel=1e-4)
        lengths = [sizes[b] for b, n in seen.items() for _ in range(n)]
        per_token = model_flops(CONFIGS["tiny"], lengths) / sum(lengths) / world_size / 1e12
        assert row["tflops_per_device"] / row["tokens_per_s"] == pytest.approx(per_token, rel=1e-4)
        assert row["mfu"] == pytest.approx(row["tflops_per_device"] / PEAK, rel=1e-4)


def test_flops_are_those_of_the_published_sizes() -> None:
    assert forward_flops(CONFIGS["wan21_1_3b"], 256) == 830_405_345_280
    assert forward_flops(CONFIGS["wan21_1_3b"], 32_760) == 283_001_787_777_024
    assert forward_flops(CONFIGS["wan21_14b"], 256) == 8_477_896_867_840
    assert model_flops(CONFIGS["wan21_1_3b"], [256, 256]) == 6 * 830_405_345_280


def test_peaks_are_known_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_of(torch.device("cpu")) is None
    for name, peak in (("NVIDIA A800-SXM4-80GB", 312.0), ("NVIDIA H200", 989.0), ("NVIDIA Future 1", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_of(torch.device("cuda", 0)) == peak
    with pytest.raises(ConfigError, match="peak_tflops=0"):
        Throughput(0.0)
