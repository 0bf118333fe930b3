"""Profiling next to real processes: a rank out of memory, every way of data parallelism, a budget."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.distributed import run_distributed
from tests.lightning.test_profile import NoisyToy
from tests.lightning.toy import Layer, Toy, digest, make_data, make_toy, make_trainer
from zellige_lightning import ZelligeStrategy
from zellige_lightning.batch import RankBatch
from zellige_lightning.engine import checkpoint
from zellige_lightning.placement.plan import WHOLE
from zellige_lightning.planner import ProfileTable

VIDEO = (4, 4, 5)


class SmallRank(Toy):
    """On rank 1 a whole video does not fit."""

    def per_token(self, batch: RankBatch) -> Tensor:
        whole = any(len(s) == 80 and s.num_tokens == 80 for s in batch.segments)
        if whole and batch.schedule.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().per_token(batch)


def small_rank(rank: int, folder: str) -> dict[str, Any]:
    strategy = ZelligeStrategy(profiler={"profile_path": f"{folder}/p.json", "repeats": 1})
    trainer = make_trainer(strategy, limit_train_batches=4)
    toy = make_toy(SmallRank)
    trainer.fit(toy, make_data())
    assert strategy.profile is not None
    return {"profile": strategy.profile.to_json(), "steps": trainer.global_step, "digest": digest(toy)}


def test_a_rank_out_of_memory_makes_the_pair_no_option_for_all(tmp_path: Path) -> None:
    first, second = run_distributed(small_rank, 2, str(tmp_path), group=False)
    assert first == second, "the ranks go on from different prices"
    assert first["steps"] == 4
    table = ProfileTable.from_json(first["profile"])
    (video,) = [bucket for bucket in table.buckets if bucket.grid == VIDEO]
    configs = {key[1] for key in table.prices_us if key[0] == video.name}
    assert configs and WHOLE not in configs
    assert video.name in table.extrapolated_us


class RecomputedLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x)


class Recorded(NoisyToy):
    """Remembers its losses; may recompute its layers; its optimizer has a state."""

    recompute = False

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        if self.recompute:
            self.net.layers = nn.ModuleList([RecomputedLayer() for _ in self.net.layers])

    def training_step(self, batch: RankBatch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Recomputed(Recorded):
    recompute = True


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bucket view": {"gradient_as_bucket_view": False},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
}
# Every way with and without recomputation, and with and without accumulation where it can: a static graph
# loses the gradients of earlier batches.
CELLS = [
    *[(way, model, 1) for way, model in zip(WAYS, (Recorded, Recomputed, Recorded, Recomputed), strict=True)],
    *[(way, model, 2) for way, model in zip(list(WAYS)[:3], (Recomputed, Recorded, Recomputed), strict=True)],
    ("static graph", Recorded, 1),
]


def trained(path: str, way: str, model: type[Recorded], accumulate: int) -> dict[str, Any]:
    profiler = {"profile_path": path, "repeats": 1, "mixed_plans": 2}
    strategy = ZelligeStrategy(profiler=profiler, **WAYS[way])
    trainer = make_trainer(strategy, limit_train_batches=3, accumulate_grad_batches=accumulate)
    toy = make_toy(model)
    trainer.fit(toy, make_data())
    state = trainer.optimizers[0].state_dict()["state"]
    return {
        "parameters and buffers": digest(toy),
        "optimizer": [[v.tolist() for v in entry.values()] for entry in state.values()],
        "losses": toy.losses,
        "generators": (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()),
    }


def every_way(rank: int, folder: str) -> list[tuple[Any, ...]]:
    results = []
    for number, cell in enumerate(CELLS):
        path = f"{folder}/{number}.json"
        fresh = trained(path, *cell)
        results.append((cell[0], cell[1].__name__, cell[2], fresh, trained(path, *cell)))
    return results


def test_profiling_leaves_no_trace_in_any_way_of_data_parallelism(tmp_path: Path) -> None:
    for rank in run_distributed(every_way, 2, str(tmp_path), group=False, timeout_s=300.0):
        assert len(rank) == len(CELLS)
        for *cell, fresh, loaded in rank:
            for what, value in fresh.items():
                assert value == loaded[what], (what, *cell)
            assert len(fresh["losses"]) == 3
    assert len(list(tmp_path.glob("*.json"))) == len(CELLS)


def within_budget(rank: int, folder: str) -> dict[str, Any]:
    profiler = {"profile_path": f"{folder}/p.json", "repeats": 50, "time_budget_s": 0.2, "mixed_plans": 0}
    strategy = ZelligeStrategy(profiler=profiler)
    make_trainer(strategy, limit_train_batches=1).fit(make_toy(), make_data())
    return json.loads(Path(f"{folder}/p.json").read_text(encoding="utf-8"))


def test_what_a_small_budget_does_not_reach_is_marked_in_the_file(tmp_path: Path) -> None:
    first, second = run_distributed(within_budget, 2, str(tmp_path), group=False)
    assert first == second
    names = {name for name, _ in first["buckets"]}
    assert {row[0] for row in first["prices_us"]} | set(first["extrapolated_us"]) == names
    measured = {json.dumps(row[:3]) for row in first["spread_us"]}
    interpolated = set(map(json.dumps, first["interpolated"]))
    assert measured | interpolated == {json.dumps(row[:3]) for row in first["prices_us"]}
    assert not measured & interpolated
