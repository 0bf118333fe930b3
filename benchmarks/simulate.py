"""Rebuilds every modeled figure of the paper, our numbers beside the paper's: `python
benchmarks/simulate.py`.

Nothing here is measured. All times come from the modeled clusters in conf/cluster, whose constants are
assumed or taken from data sheets, as each file says. `--quick` leaves out what takes long; `--json FILE`
writes flat figures.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from simulate_report import write_report

from zellige_lightning.simulator.cluster import load_cluster
from zellige_lightning.simulator.compare import ALL_POLICIES, MAIN_POLICIES, Stage
from zellige_lightning.simulator.constants import SHARES, SUITES, WAN_1_3B, Suite
from zellige_lightning.simulator.paper_figures import figure_1a, figure_1b, figure_3a, figure_3b
from zellige_lightning.simulator.prices import modeled_table
from zellige_lightning.simulator.suites import V50, SuiteResult, figures_of, run_suite, v50_bytes
from zellige_lightning.simulator.theorems import Theorem1, Theorem2, check_theorem_1, check_theorem_2
from zellige_lightning.simulator.workloads import (
    batch_of,
    fig2_counts,
    reviewer_counts,
    suite_batch,
    suite_buckets,
)

QUICK_SHARES = (35, 50, 60)
PARTS = 8  # of the random cases, which the processes share
MORE_RANKS = (64, 128, 256, 512, 1024)
OWN_SUITE = Suite("n8_15s", 15, 350_000, 8, "a800", "not in the paper")
Shares = list[Future[SuiteResult]]  # one per video-token share


@dataclass(frozen=True)
class Results:
    """Everything that the report shows."""

    suites: dict[str, SuiteResult]
    low: dict[str, SuiteResult]
    no_launch: dict[str, SuiteResult]
    fig2: Any
    reviewer: Any
    v50: V50
    v50_low: V50
    scale: list[dict[str, Any]]
    theorem1: Theorem1
    theorem2: list[Theorem2]
    fig1a: list[Any]
    fig1b: tuple[float, float]
    fig3a: dict[str, list[float]]
    fig3b: dict[str, dict[str, dict[int, float]]]
    shares: tuple[int, ...]
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="three shares, the main policies, fewer random cases"
    )
    parser.add_argument("--json", metavar="FILE", help="write flat figures")
    parser.add_argument("--report", metavar="FOLDER", help="write DATE-modeled.md and its pictures there")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    start = time.perf_counter()
    results = collect(options.quick, options.jobs)
    figures = flat_figures(results)
    seconds = time.perf_counter() - start
    figures["seconds"] = round(seconds, 1)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if options.report:
        where = write_report(replace(results, seconds=seconds), Path(options.report), machine(), date.today())
        print(f"wrote {where}")
    for name, value in figures.items():
        print(f"{name:42} {value}")


def machine() -> str:
    return f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"


def collect(quick: bool, jobs: int = 2) -> Results:
    """All numbers, in `jobs` processes."""
    shares = QUICK_SHARES if quick else SHARES
    policies = MAIN_POLICIES if quick else ALL_POLICIES
    few = (50,) if quick else (35, 50, 60)
    cases = 2_000 if quick else 10_000
    with ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("forkserver")) as pool:

        def job(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
            return pool.submit(function, *arguments)

        def suite(function: Callable[..., Any], name: Any, shares: Sequence[int], *rest: Any) -> Shares:
            return [job(function, name, (share,), *rest) for share in shares]

        # The long ones first, and suites by share, so that no process works on alone in the end.
        worlds = MORE_RANKS[:1] if quick else MORE_RANKS
        scale = [job(run_scale, ranks) for ranks in reversed(worlds)]
        suites = {name: suite(run_suite, SUITES[name], shares, policies) for name in ("n8_high", "n8_low")}
        suites |= {name: suite(run_suite, SUITES[name], shares, MAIN_POLICIES) for name in ("n32", "n16")}
        if not quick:
            suites["n8_15s"] = suite(run_suite, OWN_SUITE, few, MAIN_POLICIES)
        low = {name: suite(run_low, name, few) for name in ("n8_high", "n16")}
        none = {name: suite(run_without_launch, name, few) for name in ("n8_high", "n16")}
        parts = [job(check_theorem_1, cases // PARTS, seed) for seed in range(PARTS)]
        small = job(run_small)
        theorem2 = job(run_theorem_2)
        return Results(
            suites={name: _merged(suites[name]) for name in sorted(suites)},
            low={name: _merged(part) for name, part in low.items()},
            no_launch={name: _merged(part) for name, part in none.items()},
            scale=[future.result() for future in reversed(scale)],
            theorem1=_sum([part.result() for part in parts]),
            theorem2=theorem2.result(),
            shares=shares,
            **small.result(),
        )


def _merged(parts: Shares) -> SuiteResult:
    found = [part.result() for part in parts]
    return replace(found[0], rows={share: rows for part in found for share, rows in part.rows.items()})


def _sum(parts: list[Theorem1]) -> Theorem1:
    names = ("cases", "violations", "attained", "balanced")
    return Theorem1(*(sum(getattr(part, name) for part in parts) for name in names))


def run_low(name: str, shares: tuple[int, ...]) -> SuiteResult:
    """The lower bandwidths."""
    return run_suite(SUITES[name], shares, MAIN_POLICIES, load_cluster("a800_low"))


def run_without_launch(name: str, shares: tuple[int, ...]) -> SuiteResult:
    """A kinder machine: the free constant is zero."""
    cluster = replace(load_cluster("a800"), name="a800, no launch cost", split_launch_us=0.0)
    return run_suite(SUITES[name], shares, MAIN_POLICIES, cluster)


def run_small() -> dict[str, Any]:
    """Figs. 1 to 3, the reviewer's batch and the bytes of V50."""
    a800, low = load_cluster("a800"), load_cluster("a800_low")
    free = replace(a800, split_launch_us=0.0)
    return {
        "fig1a": figure_1a(),
        "fig1b": figure_1b(a800),
        "fig2": compare_counts(fig2_counts(), 4),
        "fig3a": figure_3a(a800, SHARES),
        "fig3b": {"with the launch cost": figure_3b(a800), "wire alone": figure_3b(free)},
        "reviewer": compare_counts(reviewer_counts(), 16),
        "v50": v50_bytes(a800),
        "v50_low": v50_bytes(low),
    }


def compare_counts(counts: dict[Any, int], ranks: int) -> Any:
    """(batch, rows of all policies, stage) on A800s."""
    cluster = load_cluster("a800")
    topology = cluster.topology(ranks)
    table = modeled_table(cluster, WAN_1_3B, topology, list(counts))
    stage, batch = Stage(cluster, WAN_1_3B, topology, table, cluster.cap_mib(WAN_1_3B)), batch_of(counts)
    rows = stage.rows(batch)
    return batch, rows, topology


def run_theorem_2() -> list[Theorem2]:
    return [check_theorem_2(ranks, p) for ranks in (2, 3, 4) for p in (1, 2, 3)]


def run_scale(ranks: int) -> dict[str, Any]:
    """High-load V50 with 10-second videos on many ranks: ours by certified gap, AdaptiveLoad, and
    KnapFormer with the best layout of equal bags, since all its layouts are too many to try."""
    from zellige_lightning.simulator.suites import uniform_layouts

    cluster, suite = load_cluster("a800"), SUITES["n8_high"]
    topology = cluster.topology(ranks)
    configs = [c for c in _node_configs() if c.degree <= ranks]
    table = modeled_table(cluster, WAN_1_3B, topology, suite_buckets(10), configs, family="aligned")
    stage = Stage(cluster, WAN_1_3B, topology, table, cluster.cap_mib(WAN_1_3B))
    batch = suite_batch(suite, 50, ranks)
    ours = stage.row("exact", batch, simulate=ranks <= 128)
    balanced = stage.row("adaptive_load", batch, simulate=False)
    layouts = uniform_layouts(ranks, WAN_1_3B.heads)
    rivals = [stage.row("knapformer", batch, layout=name, simulate=False) for name in layouts]
    best = min((row.any_plan.predicted_us for row in rivals if row.any_plan), default=None)
    assert ours.plan is not None and balanced.any_plan is not None
    return {
        "ranks": ranks,
        "sequences": len(batch.sequences),
        "ours_s": ours.plan.predicted_us / 1e6,
        "events_s": None if ours.times is None else ours.times.makespan + ours.plan.fixed_us / 1e6,
        "gap": ours.plan.gap,
        "plan_ms": ours.plan.solve_ms,
        "adaptive_load": balanced.any_plan.predicted_us / ours.plan.predicted_us,
        "knapformer_equal_bags": None if best is None else best / ours.plan.predicted_us,
    }


def _node_configs() -> list[Any]:
    from zellige_lightning.simulator.prices import default_configs

    return [c for c in default_configs(WAN_1_3B.heads, 16) if c.degree <= 8 or c.degree == 16]


def flat_figures(results: Results) -> dict[str, float]:
    figures: dict[str, float] = {}
    for result in results.suites.values():
        figures |= figures_of(result)
    figures["v50_bytes_vs_usp"] = round(results.v50.vs_usp, 4)
    figures["v50_bytes_vs_knapformer"] = round(results.v50.vs_knapformer, 4)
    figures["v50_closed_form_vs_usp"] = round(results.v50.closed_ours / results.v50.closed_usp, 4)
    figures["theorem1_cases"] = results.theorem1.cases
    figures["theorem1_violations"] = results.theorem1.violations
    figures["theorem2_failures"] = sum(not row.holds for row in results.theorem2)
    figures["fig1a_memory_ratio"] = round(results.fig1a[-1].memory, 2)
    figures["fig1a_compute_ratio_fitted"] = round(results.fig1a[-1].fitted, 1)
    return figures


if __name__ == "__main__":
    main()
