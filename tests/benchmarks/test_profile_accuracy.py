"""The plans and the statistics of `benchmarks/profile_accuracy.py`, by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from accuracy_figures import (
    Row,
    drift_pct,
    error_correlation,
    figures,
    interval,
    order_of,
    pairwise,
    repeat_noise_pct,
    repeat_spearman,
    spearman,
)
from accuracy_plans import VIDEOS, covering_rows, is_held_out, make_cases

from zellige_lightning.placement import ParallelConfig, Topology
from zellige_lightning.planner import legal_configs


@pytest.mark.parametrize(("heads", "world"), [(8, 2), (8, 4), (12, 6), (40, 8)])
def test_every_resolution_meets_every_configuration_once(heads: int, world: int) -> None:
    splits = [c for c in legal_configs(heads, world) if not c.is_whole and world % c.degree == 0]
    rows = covering_rows(splits)
    met = Counter((place, config) for row in rows for place, config in enumerate(row))
    assert met == {(place, config): 1 for place in range(len(VIDEOS)) for config in splits}
    assert len(rows) == len(splits)


def test_batches_cover_the_menu_and_half_are_held_out() -> None:
    configs = [c for c in legal_configs(8, 2) if c.degree in (1, 2)]
    cases = make_cases(Topology.uniform(2), configs, 16, 8)
    assert sum(is_held_out(case.batch.step) for case in cases) == len(cases) // 2
    for held in (False, True):
        mine = [case for case in cases if is_held_out(case.batch.step) is held]
        kinds = {candidate.kind for case in mine for candidate in case.candidates}
        assert kinds == {"covering", "one split", "whole", "random"}
        used = {
            (sequence.bucket.name, option.config)
            for case in mine
            for candidate in case.candidates
            if candidate.kind == "covering"
            for sequence, option in zip(case.batch.sequences, candidate.options, strict=True)
            if not option.config.is_whole
        }
        assert used == {(v.name, c) for v in VIDEOS for c in configs if not c.is_whole}
    for case in cases:
        assert len({candidate.options for candidate in case.candidates}) == len(case.candidates) >= 8
    assert make_cases(Topology.uniform(2), configs, 16, 8) == cases
    assert ParallelConfig(2, 1, 1) in configs


def row(batch: int, predicted: float, measured: float, **other: Any) -> Row:
    known: dict[str, Any] = {"held_out": True, "memory_mib": 100.0, "predicted_mib": 101.0}
    known |= {"wall_s": (measured, measured, 9.0 * measured), "lost": (0.05, 0.05, 0.3)}
    return Row(
        batch=batch,
        kind="x",
        digest=int(1e6 * measured),
        splits=0,
        mixed=False,
        predicted_s=predicted,
        predicted_cpu_s=predicted,
        cpu_s=(measured,) * 3,
        **{**known, **other},
    )


def test_order_of_plans() -> None:
    rows = [row(0, p, m) for p, m in ((1.0, 1.0), (1.2, 1.1), (1.1, 1.5), (1.6, 1.6))]
    order = order_of(rows, "wall")
    assert order is not None
    assert order.spearman == pytest.approx(0.8) == spearman([1, 2, 3, 4], [1, 3, 2, 4])
    assert order.pairwise_5pct == pytest.approx(5 / 6)
    assert (order.regret_pct, order.top3) == (0.0, True)
    assert pairwise(rows, "wall", 0.0, 0.08) == [True]  # 1.5 and 1.6 s
    wrong = order_of([row(0, 1.0, 1.5), row(0, 1.1, 1.0), row(0, 1.2, 1.2)], "wall")
    assert wrong is not None and wrong.regret_pct == pytest.approx(50.0)
    assert order_of([row(0, 1.0, 1.0), row(0, 1.0, 1.1), row(0, 1.0, 1.15)], "wall") is None, "no spread"


def test_figures_are_of_held_out_plans_by_medians() -> None:
    rows = [row(b, 1.02 * (1 + i / 4), 1 + i / 4) for b in range(4) for i in range(4)]
    spoilt = row(9, 50.0, 1.0, held_out=False)
    found = figures([*rows, spoilt], 3.0)
    assert (found["rows"], found["plans"], found["held_out"]) == (17, 17, 16)
    assert found["makespan_mape_pct"] == pytest.approx(2.0) == found["makespan_bias_pct"]
    assert found["makespan_mape_low"] == pytest.approx(2.0) == found["makespan_mape_high"]
    assert found["memory_mape_pct"] == pytest.approx(1.0) and found["memory_worst_under_pct"] == 0.0
    assert found["spearman"] == found["pairwise_accuracy_5pct"] == found["top3_accuracy"] == 1.0
    short = figures([row(0, 1.0, 1.0, predicted_mib=95.0), row(1, 1.0, 1.0)], 3.0)
    assert short["memory_worst_under_pct"] == pytest.approx(5.0)


def test_the_order_of_repeats_bounds_what_a_prediction_can_reach() -> None:
    stable = [row(0, m, m) for m in (1.0, 1.1, 1.3)]
    assert repeat_spearman(stable) == pytest.approx(1.0) and repeat_noise_pct(stable) == 0.0
    swapped = [
        row(0, 1.0, 1.0, wall_s=walls, lost=(0.0,) * 4)
        for walls in ((1.0, 1.5, 1.0, 1.5), (1.1, 1.2, 1.1, 1.2), (1.6, 1.6, 1.6, 1.6))
    ]
    assert repeat_spearman(swapped) == pytest.approx(0.5)
    assert repeat_noise_pct(swapped) == pytest.approx(100 * (0.5 / 1.5 + 0.1 / 1.2) / 3)


def test_drift_is_that_of_the_plans_measured_twice() -> None:
    later = {"again_wall_s": (1.1, 1.1, 5.0), "again_lost": (0.0, 0.0, 0.4), "again_cpu_s": (1.0,) * 3}
    rows = [row(0, 1.0, 1.0), row(1, 1.0, 1.0, held_out=False, **later), row(2, 1.0, 2.0)]
    assert drift_pct(rows) == pytest.approx(10.0) and drift_pct(rows, "cpu") == 0.0
    assert drift_pct(rows[::2]) == 0.0, "none was measured twice"


def test_errors_that_a_batch_shares_correlate() -> None:
    shared = [row(b, (1.0 + 0.1 * (b % 2)) * m, m) for b in range(6) for m in (1.0, 2.0, 3.0)]
    assert error_correlation(shared, "wall") == pytest.approx(1.0)
    own = [row(b, (1.0 + 0.1 * i) * (i + 1), i + 1) for b in range(6) for i in range(3)]
    assert error_correlation(own, "wall") < 0.0
    low, high = interval(shared, lambda rows: sum(r.error() for r in rows) / len(rows))
    assert 0.0 <= low < 0.05 < high <= 0.1
