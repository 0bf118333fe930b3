"""What the pictures show; read back from the figure, not from pixels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.toys import batch, planner, table
from zellige_lightning.errors import DataError
from zellige_lightning.placement import ParallelConfig, PlacementOption, Topology, whole

pytest.importorskip("matplotlib")

from zellige_lightning.report.pictures import loss_curve, plan_figure, plan_picture, prices_of

BATCH = batch({"v720": 3, "i720": 20, "i256": 4})
PLAN = planner(4).plan(BATCH)
PRICES = prices_of(PLAN, BATCH, table(4), Topology.uniform(4))


def test_bars_are_the_predicted_loads() -> None:
    axes = plan_figure(PLAN, BATCH, PRICES).axes[0]
    tops = [0.0] * 4
    for bar in axes.patches:
        rank = round(bar.get_x() + bar.get_width() / 2)
        assert bar.get_y() == pytest.approx(tops[rank])
        tops[rank] += bar.get_height()
    assert tops == pytest.approx([load / 1000 for load in PLAN.loads_us])
    assert axes.lines[0].get_ydata()[0] == pytest.approx(PLAN.lower_bound_us / 1000)


def test_a_bar_holds_the_starts_of_its_blocks() -> None:
    started = replace(table(4), start_us={(ParallelConfig(1, 2, 1), "node"): 900})
    options = [PlacementOption(ParallelConfig(1, 2, 1), (0, 1))] * 2 + [whole(3)] * 25
    plan = replace(PLAN, options=tuple(options))
    without, given = (prices_of(plan, BATCH, prices, Topology.uniform(4)) for prices in (table(4), started))
    assert [a - b for a, b in zip(given, without, strict=True)] == [900, *[0] * 26]


def test_splits_are_hatched_videos_warm_images_cool() -> None:
    assert PLAN.num_splits > 0
    bars = plan_figure(PLAN, BATCH, PRICES).axes[0].patches
    hatched = sum(bar.get_hatch() is not None for bar in bars)
    assert hatched == sum(o.config.degree for o in PLAN.options if not o.config.is_whole)
    warm = [bar.get_facecolor()[0] > bar.get_facecolor()[2] for bar in bars]
    assert all(is_warm for is_warm, bar in zip(warm, bars, strict=True) if bar.get_hatch())
    num_video_segments = sum(
        option.config.degree
        for option, sequence in zip(PLAN.options, BATCH.sequences, strict=True)
        if sequence.bucket.is_video
    )
    assert sum(warm) == num_video_segments < len(warm)


def test_without_prices_bars_are_tokens() -> None:
    axes = plan_figure(PLAN, BATCH).axes[0]
    assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(BATCH.num_tokens)
    assert axes.lines[0].get_ydata()[0] == pytest.approx(BATCH.num_tokens / 4)


def test_the_picture_is_written(tmp_path: Path) -> None:
    path = plan_picture(PLAN, BATCH, tmp_path / "new" / "plan.png", PRICES)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_foreign_profile_is_refused() -> None:
    with pytest.raises(DataError, match="no price for"):
        prices_of(PLAN, BATCH, table(1), Topology.uniform(4))


def test_loss_curve(tmp_path: Path) -> None:
    log = tmp_path / "metrics.csv"
    log.write_text("epoch,loss,step\n0,2.5,0\n0,,1\n0,1.5,2\n")
    assert loss_curve(log, tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match="has no column"):
        loss_curve(log, tmp_path / "loss.png", columns=("val",))
    with pytest.raises(DataError, match="no CSV log"):
        loss_curve(tmp_path / "nothing.csv", tmp_path / "loss.png")
