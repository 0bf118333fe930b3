"""The engine's settings in a whole run: another transport, traces and what is logged."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from tests.distributed import run_distributed
from tests.lightning.toy import callback_of, digest, make_data, make_toy, make_trainer, model_prices
from zellige_lightning import ZelligeStrategy
from zellige_lightning.engine.counters import KINDS
from zellige_lightning.engine.dry_run import dry_run
from zellige_lightning.engine_config import EngineConfig
from zellige_lightning.errors import ConfigError
from zellige_lightning.monitor import MakespanMonitor
from zellige_lightning.placement import (
    GlobalBatch,
    Plan,
    RankSchedule,
    build_schedule,
)
from zellige_lightning.placement.attention import AttentionGeometry
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
        geometry = AttentionGeometry(4, 4, 4, 4)
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
        {"transports": "auto"},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EngineConfig.of(settings)


def test_every_setting_is_priced_or_known_to_change_no_price() -> None:
    """A profile that was measured under other settings of the first kind is stale."""
    changes = {
        "save_attention": "all",
        "transport": "parent",
        "max_communicators": 3,
        "gather_chunks": 2,
        "max_schedules": 9,
        "trace_steps": 1,
        "debug": True,
        "kernel": "math",  # the fingerprint has the name of the kernel that is chosen
    }
    assert set(changes) == {field.name for field in fields(EngineConfig)}
    default = EngineConfig().priced
    priced = {name for name, value in changes.items() if EngineConfig.of({name: value}).priced != default}
    assert priced == {"save_attention", "transport", "max_communicators", "gather_chunks"}


def test_trace_steps_are_a_number_or_a_list() -> None:
    assert EngineConfig.of({"trace_steps": [4, 9]}).trace_steps == (4, 9)
    assert EngineConfig.of({"trace_steps": 3}).trace_steps == 3
