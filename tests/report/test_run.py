"""The report of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.toys import batch, planner, table
from zellige_lightning.placement import Topology
from zellige_lightning.report import StepRecord, run as run_module
from zellige_lightning.report.run import draw_plan, show_plans


def record(step: int, **counts: int) -> StepRecord:
    what = batch(counts, step)
    plan = planner(2).plan(what)
    return StepRecord(
        step, what, plan, plan.predicted_us, plan.predicted_us * 5 // 4, 1.0, 1.1, plan.num_splits, 2.0, 0.5
    )


RECORDS = [record(0, i256=40), record(1, v720=1, i720=4), record(2, v720=1, i720=9), record(3, i720=12)]


def test_what_was_planned_is_said() -> None:
    said: list[str] = []
    figures = show_plans(table(2), {"i256": 5}, RECORDS, lambda part: said.append(str(part)))
    assert figures["global_batches"] == 4
    assert figures["makespan_mape_pct"] == pytest.approx(20.0, abs=0.1)
    text = "\n".join(said)
    for part in (
        "Buckets",
        "anchor",
        "Profile",
        "(1,2,1)",
        "Batches",
        "predicted within 20.0 %",
        "25.0 % of it exposed",
    ):
        assert part in text


def test_the_plan_with_a_split_video_and_most_images_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []
    monkeypatch.setattr(run_module, "plan_picture", lambda plan, *rest: drawn.append(plan.step))
    draw_plan(table(2), Topology.uniform(2), RECORDS, tmp_path)
    assert RECORDS[2].num_splits > 0
    assert drawn == [2]
