"""The profile is measured once for a job, reused, refused for other jobs, and leaves no trace in the
training."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.distributed import run_distributed
from tests.lightning.toy import Layer, Toy, digest, make_data, make_toy, make_trainer
from zellige_lightning import HardwareProfiler, ZelligeStrategy, preparation


class Noisy(nn.Module):
    """Draws from the global generator in training, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        self.calls += 1
        return x + 0.01 * torch.randn_like(x)


class NoisyToy(Toy):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.net.embed = nn.Sequential(self.net.embed, Noisy())
        self.net.layers = nn.ModuleList([Layer() for _ in range(layers)])


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def about_the_profile(self) -> list[str]:
        texts, self.texts = (
            [t for t in self.texts if t.startswith(("the profile", "profile", "the measured"))],
            [],
        )
        return texts


def fit(
    messages: Messages, path: str, layers: int = 2, engine: dict[str, Any] | None = None, **settings: Any
) -> dict[str, Any]:
    calls: list[int] = []
    measure = preparation.measure_table

    def counted(*args: Any) -> Any:
        calls.append(1)
        return measure(*args)

    preparation.measure_table = counted
    strategy = ZelligeStrategy(profiler={"profile_path": path, "repeats": 1, "mixed_plans": 2}, engine=engine)
    trainer = make_trainer(strategy, limit_train_batches=3, **settings)
    toy = make_toy(NoisyToy, layers=layers)
    trainer.fit(toy, make_data())
    preparation.measure_table = measure
    return {
        "digest": digest(toy),
        "generators": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
        "calls": float(toy.net.embed[1].calls),
        "version": strategy.profile.version,
        "measured": len(calls),
        "said": messages.about_the_profile(),
    }


def profiled(rank: int, folder: str) -> dict[str, Any]:
    path = f"{folder}/profile.json"
    messages = Messages()
    results = {"fresh": fit(messages, path), "again": fit(messages, path)}
    results["deeper model"] = fit(messages, path, layers=3)
    results["other dtype"] = fit(messages, path, layers=3, precision="bf16-mixed")
    results["other engine"] = fit(
        messages, path, layers=3, precision="bf16-mixed", engine={"gather_chunks": 2}
    )
    results["own callback"] = fit(
        messages, path, layers=3, callbacks=[HardwareProfiler(profile_path=f"{folder}/own.json", repeats=1)]
    )
    Path(f"{folder}/file{rank}").touch()
    results["nowhere"] = fit(messages, f"{folder}/file0/profile.json")
    return results


def alone(rank: int, folder: str) -> dict[str, Any]:
    return fit(Messages(), f"{folder}/profile.json", layers=3, precision="bf16-mixed")


def test_profiles(tmp_path: Path) -> None:
    first, second = run_distributed(profiled, 2, str(tmp_path), group=False)
    for a, b in zip(first.values(), second.values(), strict=True):
        assert a["version"] == b["version"], "ranks plan from different prices"
        assert b["said"] == [], "rank 0 speaks for all"

    fresh, again = first["fresh"], first["again"]
    assert (fresh["measured"], again["measured"]) == (1, 0)
    assert again["said"] == ["profile loaded from profile.json"] and again["version"] == fresh["version"]

    for rank in (first, second):  # measuring has touched neither parameters nor buffers nor generators
        for what in ("digest", "generators", "calls"):
            assert rank["fresh"][what] == rank["again"][what], what
        assert rank["fresh"]["calls"] == 3

    others = (("deeper model", "model: "), ("other dtype", "precision: "), ("other engine", "engine: "))
    for case, key in others:
        assert first[case]["measured"] == 1
        (text,) = first[case]["said"]
        assert (
            "is not used, it is measured anew" in text and "measured for another job" in text and key in text
        )

    assert first["own callback"]["measured"] == 1 and (tmp_path / "own.json").is_file()
    assert "the measured profile is not kept" in first["nowhere"]["said"][-1]

    (single,) = run_distributed(alone, 1, str(tmp_path), group=False)
    assert single["measured"] == 1 and "world_size: 2 in the file, 1 here" in single["said"][0]
