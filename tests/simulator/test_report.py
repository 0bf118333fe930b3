"""The modeled report rebuilds, small, and the measured comparison runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from zellige_lightning.placement.plan import WHOLE
from zellige_lightning.simulator.cluster import load_cluster
from zellige_lightning.simulator.compare import MAIN_POLICIES
from zellige_lightning.simulator.constants import (
    PAPER_COMPUTE_RATIO,
    PAPER_MEMORY_RATIO,
    SUITES,
    image,
    video,
)
from zellige_lightning.simulator.paper_figures import figure_1a, figure_1b, figure_3a, figure_3b
from zellige_lightning.simulator.suites import figures_of, num_layouts, run_suite, uniform_layouts, v50_bytes
from zellige_lightning.simulator.theorems import check_theorem_1, check_theorem_2

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in (
        "simulate",
        "simulate_report",
        "simulate_plots",
        "step",
        "step_ranks",
        "step_report",
        "ranks",
    ):
        sys.modules.pop(name, None)


def test_a_small_report(tmp_path: Path) -> None:
    import simulate
    from simulate_report import write_report

    a800 = load_cluster("a800")
    high = run_suite(SUITES["n8_high"], (50,), MAIN_POLICIES)
    few = {image("720p"): 20, video("720p", 10): 3}  # pictures of 231 sequences take their time
    fig2, v50 = simulate.compare_counts(few, 4), v50_bytes(a800)
    results = simulate.Results(
        suites={"n8_high": high},
        low={"n8_high": high},
        no_launch={"n8_high": high},
        fig2=fig2,
        reviewer=fig2,
        v50=v50,
        v50_low=v50,
        scale=[simulate.run_scale(8)],
        theorem1=check_theorem_1(40),
        theorem2=[check_theorem_2(2, 1)],
        fig1a=figure_1a(),
        fig1b=figure_1b(a800),
        fig3a=figure_3a(a800, (35, 60)),
        fig3b={"wire alone": figure_3b(a800)},
        shares=(50,),
    )
    path = write_report(results, tmp_path, "a machine", date(2020, 2, 29))
    text = path.read_text()
    assert text.startswith("# Modeled report, 2020-02-29")
    assert "Every column here is modeled" in text and "Free constants: `split_launch_us`" in text
    for part in (
        "Fig. 1",
        "Fig. 2",
        "Fig. 3",
        "Figs. 5 and 7",
        "Fig. 6",
        "Theorem 1",
        "Theorem 2",
        "Constants",
    ):
        assert f"## {part}" in text
    for line in text.splitlines():
        for link in line.split("](")[1:]:
            assert (tmp_path / link.split(")")[0]).is_file()
    figures = simulate.flat_figures(results)
    assert figures["theorem1_violations"] == figures["theorem2_failures"] == 0
    assert figures["n8_high_knapformer_prices_mean"] > 1.0
    assert figures == figures | figures_of(high)


def test_v50_moves_less_than_the_rivals() -> None:
    """High-load V50 by the plans alone: the paper has 25.4 % of USP and 64.9 % of KnapFormer."""
    v50 = v50_bytes()
    assert v50.vs_usp <= 0.254
    assert v50.vs_knapformer <= 0.649
    assert v50.closed_ours / v50.closed_usp <= 0.254
    assert v50.usp_layout == "u4r2"
    slowest = max(row.makespan_s for row in v50.layouts)
    assert slowest <= 1.02 * v50.layouts[0].makespan_s


def test_figure_1() -> None:
    last, (light, heavy) = figure_1a()[-1], figure_1b(load_cluster("a800"))
    assert round(last.memory) == PAPER_MEMORY_RATIO
    assert last.fitted == pytest.approx(PAPER_COMPUTE_RATIO, rel=1e-4)
    assert last.flops < 0.8 * last.fitted  # the paper's ratio is not that of operations
    assert heavy > 5 * light


def test_figure_3_has_the_papers_shape() -> None:
    """Naive is the least balanced, AdaptiveLoad little better; communication falls with length, rises with
    degree."""
    found = figure_3a(load_cluster("a800"), (35, 50, 60))
    for naive, adaptive in zip(found["naive"], found["adaptive_load"], strict=True):
        assert 1.2 < adaptive < naive < 1.35
    shares = figure_3b(load_cluster("a800"))
    for degree in (2, 4, 8):
        column = [shares[name][degree] for name in ("256p", "480p", "720p", "1080p")]
        assert column == sorted(column, reverse=True)
    assert shares["1080p"][2] < shares["1080p"][4] < shares["1080p"][8]


def test_layouts_of_large_worlds() -> None:
    assert uniform_layouts(8, 12) == ["g1n8", "g2n4", "g4n2"]
    assert num_layouts(8, 12) == 17


@pytest.mark.slow
def test_measured_steps_agree_in_loss_and_show_the_straggler() -> None:
    import step
    from step_report import flat_figures, write

    batches = (((step.VIDEO, 1), (step.SMALL, 1)), ((step.SMALL, 2),))
    measured = step.measure(2, batches, ("naive", "usp"), repeats=1)
    figures = flat_figures(measured)
    assert figures["max_loss_difference"] < 1e-5
    assert measured.dominated == [0] and measured.dominance[1] == 0.5
    assert figures["cpu_ratio_naive"] == figures["least_cpu_ratio_naive"] > 1.4
    ours, naive = measured.entries["exact"], measured.entries["naive"]
    assert ours[0] is not None and naive[0] is not None and ours[1] is not None and naive[1] is not None
    assert naive[0].imbalance > 1.5 > 1.1 > ours[0].imbalance
    assert naive[1].placement == ((("image-64", WHOLE),),) * 2  # ours may split them, by noisy prices
    assert "1 video + 1 image-64 | 0.9" in write(measured, figures)
