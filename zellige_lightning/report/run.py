"""The report of a run: tables on the terminal, pictures in its folder, figures for whoever asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Rows
from pathlib import Path

from zellige_lightning.placement import Topology
from zellige_lightning.planner.cost import ProfileTable
from zellige_lightning.planner.cut import CatalogCut
from zellige_lightning.report.pictures import plan_picture, prices_of
from zellige_lightning.report.records import StepRecord, summary
from zellige_lightning.report.tables import bucket_table, profile_table, step_table


def show_plans(
    table: ProfileTable, counts: Mapping[str, int], records: Rows[StepRecord], say: Callable[[object], None]
) -> dict[str, float]:
    """Says what was planned and what it came to; returns the figures of `summary`."""
    figures = summary(records)
    for part in (
        bucket_table(table, CatalogCut.of_table(table), counts),
        profile_table(table),
        step_table(records),
    ):
        say(f"\n{part}")
    if "solve_ms_mean" in figures:
        say("\n" + _in_short(figures))
    if records:
        say(_certificates(records))
    return figures


def _in_short(figures: Mapping[str, float]) -> str:
    return (
        f"makespan: predicted within {figures['makespan_mape_pct']:.1f} % of measured on average;"
        f" largest over mean rank time {figures['imbalance_mean']:.3f};"
        f" planning {figures['solve_ms_mean']:.1f} ms a batch,"
        f" {figures['exposed_planning_pct']:.1f} % of it exposed"
    )


def _certificates(records: Rows[StepRecord]) -> str:
    """How far the plans can be from the optimum at most, and what proves it."""
    sources = Counter(record.plan.bound_source for record in records)
    named = ", ".join(f"{source} ({count})" for source, count in sources.most_common())
    worst = 100.0 * max(record.plan.gap for record in records)
    return f"certified gap at most {worst:.2f} %, bounds by {named}"


def draw_plan(table: ProfileTable, topology: Topology, records: Rows[StepRecord], folder: Path) -> Path:
    """Writes the picture of the plan that shows most; returns its path."""
    record = max(records, key=_interest)
    prices = prices_of(record.plan, record.placed, table, topology)
    return plan_picture(record.plan, record.placed, folder / "plan.png", prices, record.exchanged)


def _interest(record: StepRecord) -> tuple[int, int]:
    """Split videos first, then images beside them."""
    videos = [sequence.bucket.is_video for sequence in record.placed.sequences]
    splits = [not option.config.is_whole for option in record.plan.options]
    return sum(map(all, zip(videos, splits, strict=True))), videos.count(False)
