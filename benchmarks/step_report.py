"""What the measured comparison of `benchmarks/step.py` says: entries, flat figures, and a Markdown report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from ranks import has_own_core, machine

from zellige_lightning.placement import ParallelConfig

OURS, AGAIN = "exact", "again"
DOMINANT_SHARE = 0.95  # of a batch's price, held by its dearest sequence
Placement = tuple[tuple[tuple[str, ParallelConfig], ...], ...]  # per rank: buckets and configurations


@dataclass(frozen=True)
class Entry:
    """One policy on one batch.

    Args:
        makespans_s: of each step that counts the slowest rank, by the clock of the comparison.
        busiest_cpus_s: CPU seconds of the busiest rank, which other programs on the machine hardly change.
        imbalance: largest over mean CPU seconds of the ranks.
        predicted_s: by the profile.
        lost_share: most that a step that counts lost to what else the machine did.
        placement: what the ranks hold, up to their order: equal placements cost the same.
    """

    makespans_s: tuple[float, ...]
    busiest_cpus_s: tuple[float, ...]
    imbalance: float
    predicted_s: float
    loss: float
    lost_share: float
    placement: Placement

    @property
    def makespan_s(self) -> float:
        return median(self.makespans_s)

    @property
    def busiest_cpu_s(self) -> float:
        return median(self.busiest_cpus_s)


@dataclass(frozen=True)
class Measured:
    """All entries.

    Args:
        ranks, repeats: processes, and steps of each policy on each batch that count.
        batches: (bucket, count) rows.
        entries: by policy, per batch; ours once more as `again`. None where a policy has no plan.
        dominance: per batch, share of its dearest sequence in the sum of its whole-sequence prices.
    """

    ranks: int
    repeats: int
    batches: Sequence[Any]
    entries: dict[str, list[Entry | None]]
    dominance: list[float]

    @property
    def rivals(self) -> list[str]:
        return [name for name in self.entries if name not in (OURS, AGAIN)]

    @property
    def dominated(self) -> list[int]:
        """Batches of which one video is nearly everything."""
        return [b for b, share in enumerate(self.dominance) if share >= DOMINANT_SHARE]


Clock = Callable[[Entry], tuple[float, ...]]  # the steps that count
_DRAWS, _SURELY = 2000, 0.975


def flat_figures(measured: Measured) -> dict[str, float]:
    """`ratio_*`: rival over ours, median over the dominated batches, by the clock of the comparison, and
    `least_ratio_*`, the smallest of them; `cpu_ratio_*`: by CPU seconds of the busiest rank."""
    figures: dict[str, float] = {}
    for rival in measured.rivals:
        key = rival.replace("_", "")
        for label, clock in (("ratio", _makespans), ("cpu_ratio", _busiest)):
            if found := _ratios(measured, rival, measured.dominated, clock):
                figures[f"{label}_{key}"] = round(median(found), 4)
                figures[f"least_{label}_{key}"] = round(min(found), 4)
    for label, clock in (("", _makespans), ("cpu_", _busiest)):
        over, noise = _against_best(measured, clock)
        if not over:  # all place all batches alike
            continue
        figures[f"{label}noise_pct"] = round(100 * max(noise.values()), 2)
        figures[f"{label}noise_median_pct"] = round(100 * median(noise.values()), 2)
        figures[f"{label}worst_over_best_rival"] = round(max(over.values()), 4)
        figures[f"{label}median_over_best_rival"] = round(median(over.values()), 4)
        slower = sum(ratio > 1.0 + noise[b] for b, ratio in over.items())
        figures[f"{label}batches_slower_beyond_noise"] = slower
    figures["prediction_error_pct"] = round(100 * _prediction_error(measured), 2)
    figures["max_loss_difference"] = _loss_difference(measured)
    figures["dominated_batches"] = len(measured.dominated)
    figures["batches"] = len(measured.batches)
    return figures


def _makespans(entry: Entry) -> tuple[float, ...]:
    return entry.makespans_s


def _busiest(entry: Entry) -> tuple[float, ...]:
    return entry.busiest_cpus_s


def _steps(measured: Measured, b: int, clock: Clock) -> dict[Placement, list[float]]:
    """By placement, the steps of all entries that place a batch so: they do the same work."""
    found: dict[Placement, list[float]] = {}
    for rows in measured.entries.values():
        if (row := rows[b]) is not None:
            found.setdefault(row.placement, []).extend(clock(row))
    return found


def _ratios(measured: Measured, rival: str, batches: Sequence[int], clock: Clock) -> list[float]:
    """Rival over ours, where both have a plan."""
    found = []
    for b in batches:
        theirs, ours = measured.entries[rival][b], measured.entries[OURS][b]
        if theirs is not None and ours is not None:
            steps = _steps(measured, b, clock)
            found.append(median(steps[theirs.placement]) / median(steps[ours.placement]))
    return found


def _against_best(measured: Measured, clock: Clock) -> tuple[dict[int, float], dict[int, float]]:
    """By batch: ours over the fastest of the other placements, and the noise of that ratio, less one: what
    one comparison in forty exceeds where all placements are as fast as ours. The fastest of many is fast
    partly by luck, so as many medians as there are placements are drawn from the steps of ours."""
    generator, over, noise = np.random.default_rng(0), {}, {}
    for b, row in enumerate(measured.entries[OURS]):
        steps = _steps(measured, b, clock)
        if row is None or len(steps) == 1:
            continue
        ours = np.array(steps.pop(row.placement))
        over[b] = float(np.median(ours)) / min(median(other) for other in steps.values())
        own = _drawn_medians(generator, ours, len(ours))
        others = [_drawn_medians(generator, ours, len(other)) for other in steps.values()]
        noise[b] = float(np.quantile(own / np.min(others, axis=0), _SURELY)) - 1.0
    return over, noise


def _drawn_medians(generator: np.random.Generator, steps: np.ndarray, count: int) -> np.ndarray:
    """Medians of `count` steps, drawn with repetition."""
    return np.median(generator.choice(steps, (_DRAWS, count)), axis=1)


def _prediction_error(measured: Measured) -> float:
    """Mean absolute relative error of the predicted makespan."""
    rows = [row for entries in measured.entries.values() for row in entries if row is not None]
    return sum(abs(row.predicted_s / row.makespan_s - 1.0) for row in rows) / len(rows)


def _loss_difference(measured: Measured) -> float:
    """Largest relative difference of a batch's loss between policies."""
    worst = 0.0
    for rows in zip(*measured.entries.values(), strict=True):
        losses = [row.loss for row in rows if row is not None]
        worst = max(worst, (max(losses) - min(losses)) / abs(losses[0]))
    return worst


def write(measured: Measured, figures: dict[str, float]) -> str:
    """The report."""
    about = machine()
    clock = "wall clock"
    if not has_own_core(measured.ranks):
        clock = "CPU seconds of the busiest rank, since there are more ranks than cores"
    lines = [f"* {name}: {value:.4g}" for name, value in figures.items()]
    return "\n".join(
        [
            f"# Measured training steps on {measured.ranks} ranks, {about['date']}",
            "",
            f"**Measured** with `benchmarks/step.py`: {measured.ranks} processes on {about['cores']} cores "
            f"({about['processor']}, torch {about['torch']}), one core and one thread each, gloo, float32, a "
            f"two-layer Wan model. Makespan by {clock}. Medians over {measured.repeats} of "
            f"{2 * measured.repeats} interleaved steps: those that lost least to what else the machine did. "
            "*predicted* is by the profile, *max/mean* of CPU seconds; *lost* is the most that a step that "
            "counts waited for its core, behind other programs or its own communication thread, and by how "
            "much its core was slower than at its best, by a fixed loop before and behind the step. Nothing "
            "here is a GPU's speed.",
            "",
            *_table(measured),
            "",
            f"`ratio_*` are rival over `exact`, medians over the {len(measured.dominated)} batches whose "
            f"dearest video has at least {DOMINANT_SHARE:.0%} of the price. Entries that place a batch alike "
            "do the same work there: all figures below take their steps together. `over_best_rival` compares "
            "with the fastest of the other placements. `noise` is what one such comparison in forty exceeds "
            "where all placements are as fast as `exact`: as many medians as there are placements are drawn "
            "from the steps of its own, and the fastest of them counts, since the fastest of many is fast "
            "partly by luck. `batches_slower_beyond_noise` counts the batches that are slower by more.",
            "",
            *lines,
            "",
        ]
    )


def _table(measured: Measured) -> list[str]:
    rows = [
        "| batch | share of the dearest | policy | makespan s | busiest CPU s | predicted s | over exact | "
        "max/mean | lost |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for b, batch in enumerate(measured.batches):
        label = " + ".join(f"{count} {bucket.name}" for bucket, count in batch)
        for name in (OURS, AGAIN, *measured.rivals):
            entry, ours = measured.entries[name][b], measured.entries[OURS][b]
            if entry is None or ours is None:
                rows.append(f"| {label} | {measured.dominance[b]:.3f} | {name} | no plan | | | | | |")
                continue
            same = " (same placement)" if name != OURS and entry.placement == ours.placement else ""
            rows.append(
                f"| {label} | {measured.dominance[b]:.3f} | {name}{same} | {entry.makespan_s:.3f} | "
                f"{entry.busiest_cpu_s:.3f} | {entry.predicted_s:.3f} | "
                f"{entry.makespan_s / ours.makespan_s:.2f} | {entry.imbalance:.2f} | "
                f"{entry.lost_share:.1%} |"
            )
    return rows
