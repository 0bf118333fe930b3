"""The engine's settings in a whole run: another transport, comparing plans, traces and what is logged."""

from __future__ import annotations

import csv
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from tests.distributed import run_distributed
from tests.lightning.toy import Toy, callback_of, digest, make_data, make_toy, make_trainer, model_prices
from zellige_lightning import ZelligeStrategy
from zellige_lightning.agreement import Agreement
from zellige_lightning.batch import RankBatch, materialize
from zellige_lightning.engine.counters import KINDS
from zellige_lightning.engine.dry_run import HeadGeometry, dry_run
from zellige_lightning.engine_config import EngineConfig
from zellige_lightning.errors import ConfigError, EngineError
from zellige_lightning.fingerprint import disagreement, require_one_plan
from zellige_lightning.monitor import MakespanMonitor
from zellige_lightning.placement import (
    Bucket,
    GlobalBatch,
    ParallelConfig,
    PlacementOption,
    Plan,
    RankSchedule,
    build_schedule,
    whole,
)
from zellige_lightning.placement.schedule import padded

ENGINE = {"transport": "parent", "debug": True, "trace_steps": 2}


def train(rank: int, folder: str, engine: dict[str, Any]) -> dict[str, Any]:
    model_prices()
    logger = CSVLogger(folder, name="", version="")
    trainer = make_trainer(ZelligeStrategy(engine=engine), logger=logger)
    toy = make_toy()
    trainer.fit(toy, make_data())
    records = callback_of(trainer, MakespanMonitor).records
    return {
        "digest": digest(toy),
        "counters": [r.counters for r in records],
        "plans": [(r.plan, r.batch) for r in records],
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[Any]]:
    plain, settings = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("settings")
    return (
        settings,
        run_distributed(train, 2, str(plain), {}),
        run_distributed(train, 2, str(settings), ENGINE),
    )


def test_settings_do_not_change_what_is_learned(runs: Any) -> None:
    _, plain, other = runs
    assert len({run["digest"] for run in (*plain, *other)}) == 1
    assert plain[0]["counters"] == plain[1]["counters"] == other[0]["counters"]


def test_a_trained_step_is_counted_as_its_dry_run(runs: Any) -> None:
    run, split = runs[1][0], 0
    for counters, (plan, batch) in zip(run["counters"], run["plans"], strict=True):
        schedules = [batch_schedule(plan, batch, rank) for rank in range(2)]
        geometry = HeadGeometry(4, 4, 4, 4)
        assert list(counters) == [dry_run(s, geometry, num_layers=2) for s in schedules]
        split += plan.num_splits
    assert split


def batch_schedule(plan: Plan, batch: GlobalBatch, rank: int) -> RankSchedule:
    lengths = [s.num_tokens for s in batch.sequences]
    return padded(build_schedule(plan.options, lengths, rank, plan.world_size))


def test_the_log_has_the_figures(runs: Any) -> None:
    folder, _, other = runs
    with open(folder / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["zellige/bytes_mb"]]
    assert len(rows) == len(other[0]["counters"])
    for row, counters in zip(rows, other[0]["counters"], strict=True):
        sent = sum(c.total_bytes for c in counters) / 1e6
        assert float(row["zellige/bytes_mb"]) == pytest.approx(sent, rel=1e-5)
        kinds = [float(row[f"zellige/{kind}_mb"]) for kind in KINDS]
        assert sum(kinds) == pytest.approx(sent, rel=1e-5)
        assert float(row["zellige/network_mb"]) == 0
        assert float(row["zellige/collectives"]) == max(sum(c.exchanges.values()) for c in counters)
        assert float(row["zellige/kernel_calls"]) == max(sum(c.kernel_calls.values()) for c in counters)
        assert float(row["zellige/communicators"]) == 1


def test_traces_stand_next_to_the_log(runs: Any) -> None:
    folder, _, other = runs
    assert sorted(path.name for path in folder.glob("trace*")) == ["trace-step-0.json", "trace-step-1.json"]
    for step in (0, 1):
        events = json.loads((folder / f"trace-step-{step}.json").read_text())["traceEvents"]
        for rank, counters in enumerate(other[0]["counters"][step]):
            kernels = [e for e in events if e["pid"] == rank and e.get("cat") == "compute"]
            assert len(kernels) == sum(counters.kernel_calls.values())


class Meddling(Toy):
    """Trains with another plan on one rank, as a hook that replaces batches might."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch = super().on_before_batch_transfer(batch, dataloader_idx)
        if self.global_rank == 1 and self.global_step == 1 and isinstance(batch, RankBatch):
            object.__setattr__(
                batch, "plan", Plan(batch.plan.step, 2, batch.plan.options[::-1], (0, 0), (0, 0))
            )
        return batch


def train_with_another_plan(rank: int) -> tuple[str, str]:
    model_prices()
    torch.manual_seed(0)
    trainer = make_trainer(ZelligeStrategy(engine={"debug": True}))
    with pytest.raises(EngineError) as caught:
        trainer.fit(Meddling(), make_data())
    return type(caught.value).__name__, str(caught.value)


def test_another_plan_in_a_run_stops_all_ranks_before_the_step() -> None:
    for kind, message in run_distributed(train_with_another_plan, 2):
        assert kind == "EngineError"
        assert "before the first exchange of step 1, rank 1 (step 1, digest" in message


class Tokens:
    def __init__(self) -> None:
        self.samples: tuple[Any, ...] = ()
        self.token_fields: dict[str, Any] = {}
        self.sequence_fields: dict[str, Any] = {}

    def read_tokens(self, sequence: Any, tokens: range) -> dict[str, Any]:
        return {}

    def read_sequence(self, sequence: Any) -> dict[str, Any]:
        return {}


BATCH = GlobalBatch.of(7, 0, [("a", Bucket("video", (4, 4, 4))), ("b", Bucket("image", (1, 4, 4)))])
SPLIT = PlacementOption(ParallelConfig(1, 1, 3), (0, 1, 2))


def wave(rank: int, options: tuple[PlacementOption, ...]) -> RankBatch:
    plan = Plan(7, 3, options, (0, 0, 0), (0, 0, 0))
    return materialize(BATCH, plan, rank, Tokens())  # type: ignore[arg-type]


def compare(rank: int, mistake: str) -> tuple[str, float]:
    agreement = Agreement(timedelta(seconds=2))
    options = (SPLIT, whole(0))
    batch = wave(rank, options)
    if rank == 1 and mistake == "plan":
        batch = wave(rank, (whole(0), SPLIT))
    if rank == 1 and mistake == "schedule":
        batch.schedule = wave(rank, (whole(0), SPLIT)).schedule
    if rank == 1 and mistake == "late":
        time.sleep(4.5)
    began = time.monotonic()
    try:
        require_one_plan(agreement, 8 if rank == 2 and mistake == "step" else 7, [batch])
    except EngineError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("none", ""),
        ("plan", "step 7, rank 1 (step 7, digest"),
        ("step", "rank 2 (step 8, digest"),
        ("schedule", "the schedule of ranks [1] is not what their plan says"),
    ],
)
def test_whoever_differs_is_named_on_all_ranks(mistake: str, says: str) -> None:
    results = run_distributed(compare, 3, mistake)
    for message, elapsed_s in results:
        assert bool(message) == bool(says) and says in message
        assert elapsed_s < 4
    if mistake == "plan":
        assert len({message for message, _ in results}) == 1


def test_a_rank_that_does_not_come_is_reported_in_time() -> None:
    for message, elapsed_s in run_distributed(compare, 3, "late")[::2]:
        assert "the ranks' gather before a step failed" in message
        assert elapsed_s < 4


def test_of_two_ranks_the_second_is_said_to_differ() -> None:
    assert disagreement([(3, 5, 1), (3, 6, 1)]).startswith("rank 1 (step 3, digest 6) has another plan")
    assert disagreement([(3, 5, 1), (3, 6, 1), (3, 6, 1)]).startswith("rank 0 (step 3, digest 5)")


@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "carrier pigeon"},
        {"max_communicators": 0},
        {"max_communicators": 1.5},
        {"gather_chunks": 0},
        {"gather_chunks": True},
        {"trace_steps": -1},
        {"trace_steps": "all"},
        {"trace_steps": [1, -2]},
        {"debug": "yes"},
        {"transprot": "auto"},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig.of(settings)


def test_trace_steps_are_a_number_or_a_list() -> None:
    assert EngineConfig.of({"trace_steps": [4, 9]}).trace_steps == (4, 9)
    assert EngineConfig.of({"trace_steps": 3}).trace_steps == 3
