"""Figures of a run, by hand."""

from __future__ import annotations

import pytest

from zellige_lightning.placement import Bucket, GlobalBatch, Plan, whole
from zellige_lightning.report import StepRecord, summary

IMAGE = Bucket("image", (1, 2, 2))


def record(
    step: int,
    predicted_us: int,
    measured_us: int,
    *,
    solve_ms: float = 10.0,
    exposed_ms: float = 0.0,
    key: str = "",
) -> StepRecord:
    batch = GlobalBatch.of(step, 0, [(key or f"sample-{step}", IMAGE)])
    plan = Plan(step, 1, (whole(0),), (predicted_us,), (1,))
    return StepRecord(
        step, batch, plan, predicted_us, measured_us, 1.0, 1.0 + step / 10, 2, solve_ms, exposed_ms
    )


def test_the_first_record_counts_but_is_not_averaged() -> None:
    records = [
        record(0, 500, 100, solve_ms=1000.0, exposed_ms=1000.0),
        record(1, 90, 100, solve_ms=10.0, exposed_ms=1.0),
        record(2, 120, 100, solve_ms=30.0, exposed_ms=1.0),
    ]
    figures = summary(records)
    assert figures["global_batches"] == 3
    assert figures["splits_total"] == 6
    assert figures["makespan_mape_pct"] == pytest.approx((10 + 20) / 2)
    assert figures["imbalance_mean"] == pytest.approx(1.15)
    assert figures["exposed_planning_pct"] == pytest.approx(100 * 2 / 40)
    assert figures["solve_ms_mean"] == pytest.approx(20.0)


def test_batches_are_distinct_by_their_samples_not_their_number() -> None:
    records = [record(0, 1, 1, key="a"), record(1, 1, 1, key="b"), record(2, 1, 1, key="a")]
    assert summary(records)["distinct_batches"] == 2


def test_one_record_has_no_averages() -> None:
    figures = summary([record(0, 1, 1)])
    assert figures == {"global_batches": 1, "splits_total": 2, "distinct_batches": 1}


def test_planning_that_took_no_time_was_not_exposed() -> None:
    records = [record(0, 1, 1, solve_ms=0.0), record(1, 1, 1, solve_ms=0.0)]
    assert summary(records)["exposed_planning_pct"] == 0.0
