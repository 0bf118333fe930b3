"""The text of `benchmarks/profile_accuracy.py`."""

from __future__ import annotations

from statistics import mean
from typing import Any

from accuracy_figures import Row, figures, mape, pairwise
from accuracy_ranks import Settings
from ranks import machine

_GAPS = ((0.0, 0.02), (0.02, 0.05), (0.05, 0.1), (0.1, 0.2), (0.2, float("inf")))


def report(
    rows: list[Row],
    numbers: dict[str, float],
    found: dict[str, Any],
    clock: str,
    ranks: int,
    settings: Settings,
) -> str:
    """Markdown."""
    about = machine()
    held = [row for row in rows if row.held_out]
    named = "makespan by wall clock" if clock == "wall" else "CPU seconds of the busiest rank"
    lines = [
        f"# Accuracy of the profile, {about['date']}",
        "",
        f"**Measured**: {named}, {ranks} processes on {about['cores']} cores of {about['processor']}, one "
        f"thread each, gloo, float32, two Wan layers, torch {about['torch']}; medians over "
        f"{settings.repeats} of {2 * settings.repeats} interleaved steps per plan, those that lost least "
        f"to what else the machine did; {found['seconds']:.0f} s in all. Nothing here is a GPU's speed.",
        "",
        f"{len(rows)} plans, {len(held)} held out, of which {sum(r.mixed for r in held)} put shards beside "
        "whole sequences. Prices were frozen before the first held-out step, sha256 "
        f"{found['frozen_sha256'][:16]}. `drift_pct` is how much slower some other plans ran between the "
        "held-out steps than before: no price can know it, and all errors have it as a bias.",
        "",
        "| figure | value |",
        "|---|---|",
        *(f"| {name} | {value:.4g} |" for name, value in numbers.items()),
        "",
        *_ablation(found, clock),
        *_by_splits(held, clock),
        *_by_kind(held, clock),
        *_by_gap(held, clock),
    ]
    if clock == "wall":
        other = figures(rows, found["profiling_seconds"], "cpu")
        lines += [
            "The same plans in CPU seconds of the busiest rank:",
            "",
            *(
                f"* {name}: {other[name]:.4g}"
                for name in ("makespan_mape_pct", "makespan_bias_pct", "drift_pct", "spearman")
            ),
            *(
                f"* {name}: {other[name]:.4g}"
                for name in ("repeat_spearman", "pairwise_accuracy_5pct", "top1_regret_pct")
            ),
        ]
    return "\n".join(lines) + "\n"


def _ablation(found: dict[str, Any], clock: str) -> list[str]:
    chosen, terms = found["calibration"][clock]["model"], found["calibration"][clock]["terms"]
    lines = [
        f"Forms of the model, fitted to the plans that are not held out; `{chosen}` was chosen, by batches "
        "left out among those:",
        "",
        "| form | left out MAPE % | held out MAPE % | bias % |",
        "|---|---|---|---|",
    ]
    left_out = found["calibration"][clock]["left_out_pct"]
    for name, (error, bias) in found["ablation"][clock].items():
        lines.append(f"| {name} | {left_out[name]:.2f} | {error:.2f} | {bias:+.2f} |")
    values = ", ".join(f"{name} {value:.4g}" for name, value in terms.items())
    return [*lines, "", f"Chosen terms: {values}.", ""]


def _by_splits(rows: list[Row], clock: str) -> list[str]:
    lines = ["| split sequences | plans | MAPE % | bias % |", "|---|---|---|---|"]
    for low, high, name in ((0, 0, "none"), (1, 1, "1"), (2, 3, "2-3"), (4, 99, "4 and more")):
        errors = [row.error(clock) for row in rows if low <= row.splits <= high]
        if errors:
            lines.append(f"| {name} | {len(errors)} | {mape(errors):.2f} | {100 * mean(errors):+.2f} |")
    return [*lines, ""]


def _by_kind(rows: list[Row], clock: str) -> list[str]:
    lines = ["| plans | number | MAPE % | bias % | memory MAPE % |", "|---|---|---|---|---|"]
    for kind in sorted({row.kind for row in rows}):
        members = [row for row in rows if row.kind == kind]
        errors = [row.error(clock) for row in members]
        memory = mape(row.memory_error for row in members)
        lines.append(
            f"| {kind} | {len(members)} | {mape(errors):.2f} | {100 * mean(errors):+.2f} | {memory:.2f} |"
        )
    return [*lines, ""]


def _by_gap(rows: list[Row], clock: str) -> list[str]:
    lines = ["| measured gap | pairs of one batch | rightly ordered % |", "|---|---|---|"]
    for low, high in _GAPS:
        right = []
        for batch in sorted({row.batch for row in rows}):
            right += pairwise([row for row in rows if row.batch == batch], clock, low, high)
        if right:
            upper = "" if high == float("inf") else f" to {100 * high:.0f}"
            lines.append(f"| {100 * low:.0f}{upper} % | {len(right)} | {100 * mean(right):.1f} |")
    return [*lines, ""]
