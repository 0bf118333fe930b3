"""What the tables say, on the planner's toy catalog."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.toys import BUCKETS, batch, planner, table
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.cut import CatalogCut
from zellige_lightning.report import StepRecord
from zellige_lightning.report.tables import bucket_table, profile_table, step_table


def record(step: int) -> StepRecord:
    what = batch({"v720": 1, "i256": 3}, step)
    plan = planner(2).plan(what)
    return StepRecord(step, what, plan, plan.predicted_us, 2 * plan.predicted_us, 1.0, 1.25, 1, 3.0, 0.5)


def test_buckets_stand_by_price_with_their_side_of_the_cut() -> None:
    prices = table(2)
    rows = bucket_table(prices, CatalogCut.of_table(prices), {"i256": 7}).rows
    assert [row[0] for row in rows] == ["i256", "i720", "v480", "v720"]
    assert [row[-1] for row in rows] == ["filler", "filler", "anchor", "anchor"]
    assert rows[0][1:5] == ("image", "1x16x16", "256", "7")
    assert rows[1][4] == "-"
    assert rows[3][5] == f"{prices.whole_us(BUCKETS['v720']) / 1000:.2f}"


def test_a_profile_has_a_column_for_each_configuration() -> None:
    text = profile_table(table(2))
    assert text.columns == ("bucket", "(1,1,1)", "(1,1,2)", "(1,2,1)", "(2,1,1)")
    assert all(len(row) == 5 and "-" not in row[1:] for row in text.rows)
    assert "start" not in text.note
    started = replace(table(2), start_us={(ParallelConfig(1, 2, 1), "node"): 900})
    assert "start of a call in ms: (1,2,1)@node 0.90" in profile_table(started).note


def test_prices_that_were_not_measured_are_marked() -> None:
    prices = table(2)
    missing = ("v480", prices.classes[-1][0], "node")
    shown = profile_table(replace(prices, interpolated=frozenset({missing})))
    marked = [(row[0], cell) for row in shown.rows for cell in row[1:] if cell.startswith("~")]
    assert [name for name, _ in marked] == ["v480"]
    assert "~ 1 interpolated" in shown.note
    whole = replace(prices, interpolated=frozenset({("v480", prices.classes[0][0], "node")}))
    rows = bucket_table(whole, CatalogCut.of_table(whole)).rows
    assert [row[6] for row in rows] == ["measured", "measured", "interpolated", "measured"]


def test_predicted_and_measured_stand_side_by_side() -> None:
    row = step_table([record(5)]).rows[0]
    assert row[:5] == ("5", "3", "1", str(BUCKETS["v720"].num_tokens + 3 * 256), "1")
    assert float(row[6]) == pytest.approx(2 * float(row[5]), abs=0.02)
    assert row[7] == "50.0"


def test_a_long_run_is_thinned_and_says_so() -> None:
    shown = step_table([record(0)] * 45, limit=20)
    assert len(shown.rows) == 15
    assert "every 3. of 45" in shown.note


def test_columns_line_up() -> None:
    lines = str(profile_table(table(2))).splitlines()[1:-1]
    assert len({len(line) for line in lines}) == 1
