"""All policies on the same batches with real processes and real training steps: `python benchmarks/step.py`.

Every process is pinned to one core with one thread. All policies share one model, one profile and one
engine, and take turns batch by batch, so that what else the machine does meets all of them. Figures are
medians.

2 ranks are compared by wall clock. With more ranks than cores, wall clock says nothing; then the figures
are the CPU seconds of the busiest rank, and the output says so. Nothing here is a GPU's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from step_ranks import Job, run_rank

from zellige_lightning.placement import Bucket, Plan

VIDEO, SHORT = Bucket("video", (8, 16, 16)), Bucket("short-video", (5, 12, 16))
LARGE, SMALL = Bucket("image-256", (1, 16, 16)), Bucket("image-64", (1, 8, 8))
# One dominant video beside a few images; the measured profile says how dominant it is.
DOMINATED = (
    ((VIDEO, 1), (SMALL, 1)),
    ((VIDEO, 1), (SMALL, 2)),
    ((VIDEO, 1), (SMALL, 3)),
    ((VIDEO, 1), (LARGE, 1)),
)
MIXED = (
    ((VIDEO, 1), (LARGE, 4), (SMALL, 8)),
    ((VIDEO, 1), (SHORT, 1), (SMALL, 4)),
    ((VIDEO, 2), (LARGE, 2)),
    ((SHORT, 3), (LARGE, 3)),
    ((SHORT, 1), (SMALL, 24)),
    ((LARGE, 5), (SMALL, 9)),
)
DOMINANT_SHARE = 0.95
OURS = "exact"
QUICK_RIVALS = ("naive", "adaptive_load", "usp", "knapformer")
ALL_RIVALS = ("paper", *QUICK_RIVALS, "disjoint", "flexsp", "megatron", "hotspa", "bytescale", "skrull")


@dataclass(frozen=True)
class Entry:
    """One policy on one batch: medians over the rounds.

    Args:
        makespan_s: slowest rank, by the clock of the comparison.
        busiest_cpu_s: CPU seconds of the busiest rank, which other programs on the machine hardly change.
        imbalance: largest over mean CPU seconds of the ranks.
        predicted_s: by the profile.
    """

    makespan_s: float
    busiest_cpu_s: float
    imbalance: float
    predicted_s: float
    loss: float


Measured = dict[str, list[Entry | None]]  # by policy, per batch
Clock = Callable[[Entry], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and rivals")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--json", metavar="FILE", help="write flat figures")
    parser.add_argument("--report", metavar="FILE", help="write a dated Markdown report")
    options = parser.parse_args()
    rivals = QUICK_RIVALS if options.quick else ALL_RIVALS
    batches = DOMINATED + MIXED
    measured = measure(options.ranks, batches, rivals, repeats=4 if options.quick else 7)
    figures = flat_figures(measured, rivals)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    text = report(measured, batches, rivals, figures, options.ranks)
    if options.report:
        Path(options.report).write_text(text, encoding="utf-8")
    print(text)


def uses_wall_clock(ranks: int) -> bool:
    """Whether every rank has a core of its own."""
    return ranks <= len(os.sched_getaffinity(0))


def measure(ranks: int, batches: Sequence[Any], rivals: Sequence[str], repeats: int) -> Measured:
    """Entries by policy and batch; ours once more as `again`."""
    entries = (OURS, *rivals, OURS)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(ranks, f"{folder}/store", tuple(batches), entries, repeats)
        with ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:
            results = [
                future.result() for future in [pool.submit(run_rank, rank, job) for rank in range(ranks)]
            ]
    plans: dict[str, list[Plan | None]] = results[0]["plans"]
    names = [*entries[:-1], "again"]
    return {
        name: [
            _entry(results, e, b, plans[entries[e]][b], uses_wall_clock(ranks)) for b in range(len(batches))
        ]
        for e, name in enumerate(names)
    }


def _entry(results: list[dict[str, Any]], e: int, b: int, plan: Plan | None, wall: bool) -> Entry | None:
    if plan is None:
        return None
    rounds = list(zip(*(result["times"][e, b] for result in results), strict=True))
    walls = [max(step.wall_s for step in ranks) for ranks in rounds]
    busiest = [max(step.cpu_s for step in ranks) for ranks in rounds]
    shares = [max(s.cpu_s for s in ranks) * len(ranks) / sum(s.cpu_s for s in ranks) for ranks in rounds]
    losses = [sum(step.loss for step in ranks) / len(ranks) for ranks in rounds]
    makespan, cpu = median(walls if wall else busiest), median(busiest)
    return Entry(makespan, cpu, median(shares), plan.predicted_us / 1e6, median(losses))


def flat_figures(measured: Measured, rivals: Sequence[str]) -> dict[str, float]:
    """`ratio_*`: rival over ours, median over the dominated batches, by the clock of the comparison;
    `cpu_ratio_*`: the same by CPU seconds of the busiest rank."""
    figures: dict[str, float] = {}
    for rival in rivals:
        key = rival.replace("_", "")
        for label, clock in (("ratio", _makespan), ("cpu_ratio", _busiest)):
            found = [_ratio(measured[rival][b], measured[OURS][b], clock) for b in range(len(DOMINATED))]
            if known := [x for x in found if x is not None]:
                figures[f"{label}_{key}"] = round(median(known), 4)
    for label, clock in (("", _makespan), ("cpu_", _busiest)):
        noise = _noise(measured, clock)
        figures[f"{label}noise_pct"] = round(100 * max(noise), 2)
        figures[f"{label}noise_median_pct"] = round(100 * median(noise), 2)
        figures[f"{label}worst_over_best_rival"] = round(_worst(measured, rivals, clock), 4)
    figures["max_loss_difference"] = _loss_difference(measured)
    return figures


def _makespan(entry: Entry) -> float:
    return entry.makespan_s


def _busiest(entry: Entry) -> float:
    return entry.busiest_cpu_s


def _ratio(rival: Entry | None, ours: Entry | None, clock: Clock = _makespan) -> float | None:
    return None if rival is None or ours is None else clock(rival) / clock(ours)


def _noise(measured: Measured, clock: Clock) -> list[float]:
    """How far the same plan is from itself, per batch."""
    pairs = zip(measured["again"], measured[OURS], strict=True)
    return [abs(x - 1.0) for again, ours in pairs if (x := _ratio(again, ours, clock)) is not None]


def _worst(measured: Measured, rivals: Sequence[str], clock: Clock) -> float:
    """Ours over the best rival, on the batch where that is largest."""
    worst = 0.0
    for b, ours in enumerate(measured[OURS]):
        times = [clock(row) for rival in rivals if (row := measured[rival][b]) is not None]
        if ours is not None and times:
            worst = max(worst, clock(ours) / min(times))
    return worst


def _loss_difference(measured: Measured) -> float:
    """Largest relative difference of a batch's loss between policies."""
    worst = 0.0
    for rows in zip(*measured.values(), strict=True):
        losses = [row.loss for row in rows if row is not None]
        worst = max(worst, (max(losses) - min(losses)) / abs(losses[0]))
    return worst


def report(
    measured: Measured,
    batches: Sequence[Any],
    rivals: Sequence[str],
    figures: dict[str, float],
    ranks: int,
) -> str:
    clock = (
        "wall clock" if uses_wall_clock(ranks) else "CPU seconds of the busiest rank (more ranks than cores)"
    )
    head = [
        f"# Measured training steps, {date.today().isoformat()}",
        "",
        f"**Measured**: {ranks} processes on {len(os.sched_getaffinity(0))} cores ({platform.machine()}, "
        f"{platform.system()}), one core and one thread each, gloo, float32, a two-layer Wan model. "
        f"Makespan by {clock}; "
        "imbalance from CPU seconds. *predicted* is the profile's, which counts CPU seconds. Nothing here "
        "is a GPU's speed.",
        "",
        "| batch | policy | makespan s | busiest CPU s | predicted s | over exact | max/mean |",
        "|---|---|---|---|---|---|---|",
    ]
    for b, rows in enumerate(batches):
        label = " + ".join(f"{count} {bucket.name}" for bucket, count in rows)
        for name in (OURS, "again", *rivals):
            entry = measured[name][b]
            if entry is not None:
                ratio = _ratio(entry, measured[OURS][b]) or 0.0
                head.append(
                    f"| {label} | {name} | {entry.makespan_s:.3f} | {entry.busiest_cpu_s:.3f} | "
                    f"{entry.predicted_s:.3f} | {ratio:.2f} | "
                    f"{entry.imbalance:.2f} |"
                )
    lines = [f"* {name}: {value:.4g}" for name, value in figures.items()]
    return "\n".join(
        [*head, "", "Ratios are medians over the first four batches, which one video dominates.", "", *lines]
    )


if __name__ == "__main__":
    main()
