"""Pictures of the modeled report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from zellige_lightning.report.pictures import plan_picture
from zellige_lightning.simulator.compare import MAIN_POLICIES, Stage
from zellige_lightning.simulator.constants import PAPER_SPEEDUPS
from zellige_lightning.simulator.suites import SuiteResult, step_s

if TYPE_CHECKING:
    from simulate import Results

FIG2_PLANS = ("naive", "adaptive_load", "usp", "knapformer-g3n1+g1n1", "exact")


def draw_all(results: Results, folder: Path) -> None:
    """Pictures as SVG with text as text, so that they can be read and compared as files."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "zellige"}):
        _figure_1a(results, folder / "fig1a.svg")
        _figure_2(results, folder)
        for name, result in results.suites.items():
            _suite(result, folder / f"{name}.svg")
        _figure_6b(results, folder / "fig6b.svg")


def _canvas(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _figure_1a(results: Results, path: Path) -> None:
    figure, axes = _canvas(6.4, 3.6)
    names = [d.bucket.name for d in results.fig1a]
    for label, values in (
        ("memory (tokens)", [d.memory for d in results.fig1a]),
        ("compute, fitted c", [d.fitted for d in results.fig1a]),
        ("compute, operations", [d.flops for d in results.fig1a]),
    ):
        axes.semilogy(names, values, marker="o", label=label)
    axes.set_ylabel("over a 256p image (modeled)")
    axes.tick_params(axis="x", labelrotation=30, labelsize=7)
    axes.legend(fontsize=7)
    figure.savefig(path)


def _figure_2(results: Results, folder: Path) -> None:
    """Tokens per rank, as the paper draws them; KnapFormer in the paper's layout, whose memory is not
    bounded here."""
    batch, rows, topology = results.fig2
    plans = {row.policy: row.any_plan for row in rows}
    plans["knapformer-g3n1+g1n1"] = _fixed_layout(batch, topology)
    for name in FIG2_PLANS:
        plan_picture(plans[name], batch, folder / f"fig2-{name}.svg")


def _fixed_layout(batch: Any, topology: Any) -> Any:
    from zellige_lightning.simulator.cluster import load_cluster
    from zellige_lightning.simulator.constants import WAN_1_3B
    from zellige_lightning.simulator.prices import modeled_table

    cluster = load_cluster("a800")
    buckets = list(dict.fromkeys(s.bucket for s in batch.sequences))
    table = modeled_table(cluster, WAN_1_3B, topology, buckets)
    stage = Stage(cluster, WAN_1_3B, topology, table, 1 << 40)
    return stage.row("knapformer", batch, layout="g3n1+g1n1", simulate=False).plan


def _suite(result: SuiteResult, path: Path) -> None:
    """Simulated steps of the main policies; hatched without memory cap; the paper's mean ratios as crosses
    on ours."""
    figure, axes = _canvas(8.0, 3.4)
    shown = [name for name in MAIN_POLICIES if name in result.policies]
    width = 0.8 / len(shown)
    for i, name in enumerate(shown):
        for j, rows in enumerate(result.rows.values()):
            seconds = step_s(rows[name])
            if seconds is not None:
                hatch = "////" if rows[name].out_of_memory else None
                axes.bar(
                    j + i * width,
                    seconds,
                    width,
                    color=f"C{i}",
                    hatch=hatch,
                    edgecolor="black",
                    linewidth=0.3,
                )
        axes.bar(0, 0, 0, color=f"C{i}", label=name)
    for rival, (_, mean, _) in PAPER_SPEEDUPS.get(result.suite.name, {}).items():
        if mean is not None and rival in shown:
            at = [
                (j + shown.index(rival) * width, step_s(rows["exact"]))
                for j, rows in enumerate(result.rows.values())
            ]
            axes.plot([x for x, _ in at], [mean * (s or 0.0) for _, s in at], "kx", markersize=5)
    axes.set_xticks([j + 0.4 for j in range(len(result.rows))], [f"V{share}" for share in result.rows])
    axes.set_ylabel("modeled step (s)")
    axes.set_title(
        f"{result.suite.name}: modeled; x = paper's mean ratio on ours; hatched = without memory cap",
        fontsize=8,
    )
    axes.legend(fontsize=7)
    figure.savefig(path)


def _figure_6b(results: Results, path: Path) -> None:
    rows = results.suites["n8_high"].rows[50]
    figure, axes = _canvas(8.0, 3.2)
    shown = [name for name in MAIN_POLICIES if rows[name].times is not None]
    for i, name in enumerate(shown):
        times = rows[name].times
        busy = [c + e for c, e in zip(times.computing, times.exposed, strict=True)]
        axes.bar([i + 0.1 * r for r in range(len(busy))], busy, 0.09, color=f"C{i}")
        axes.text(i, max(busy), f"{times.imbalance:.2f}x", fontsize=8)
    axes.set_xticks([i + 0.35 for i in range(len(shown))], shown, fontsize=8)
    axes.set_ylabel("modeled time of each rank (s)")
    figure.savefig(path)
