"""What the measured comparison of `benchmarks/step.py` says: entries, flat figures, and a Markdown report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ranks import CORES, machine

from zellige_lightning.placement import ParallelConfig

OURS, AGAIN = "exact", "again"
DOMINANT_SHARE = 0.95  # of a batch's price, held by its dearest sequence
Placement = tuple[tuple[tuple[str, ParallelConfig], ...], ...]  # per rank: buckets and configurations


@dataclass(frozen=True)
class Entry:
    """One policy on one batch: medians over the rounds.

    Args:
        makespan_s: slowest rank, by the clock of the comparison.
        busiest_cpu_s: CPU seconds of the busiest rank, which other programs on the machine hardly change.
        imbalance: largest over mean CPU seconds of the ranks.
        predicted_s: by the profile.
        queued_share: most that a step that counts waited for its core.
        placement: what the ranks hold, up to their order: equal placements cost the same.
    """

    makespan_s: float
    busiest_cpu_s: float
    imbalance: float
    predicted_s: float
    loss: float
    queued_share: float
    placement: Placement


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


Clock = Callable[[Entry], float]


def uses_wall_clock(ranks: int) -> bool:
    """Whether every rank has a core of its own."""
    return ranks <= len(CORES)


def flat_figures(measured: Measured) -> dict[str, float]:
    """`ratio_*`: rival over ours, median over the dominated batches, by the clock of the comparison, and
    `least_ratio_*`, the smallest of them; `cpu_ratio_*`: by CPU seconds of the busiest rank."""
    figures: dict[str, float] = {}
    for rival in measured.rivals:
        key = rival.replace("_", "")
        for label, clock in (("ratio", _makespan), ("cpu_ratio", _busiest)):
            if found := _ratios(measured, rival, measured.dominated, clock):
                figures[f"{label}_{key}"] = round(median(found), 4)
                figures[f"least_{label}_{key}"] = round(min(found), 4)
    for label, clock in (("", _makespan), ("cpu_", _busiest)):
        noise = _noise(measured, clock)
        figures[f"{label}noise_pct"] = round(100 * max(noise), 2)
        figures[f"{label}noise_median_pct"] = round(100 * median(noise), 2)
        figures[f"{label}worst_over_best_rival"] = round(max(_over_best(measured, clock).values()), 4)
    figures["prediction_error_pct"] = round(100 * _prediction_error(measured), 2)
    figures["max_loss_difference"] = _loss_difference(measured)
    figures["dominated_batches"] = len(measured.dominated)
    figures["batches"] = len(measured.batches)
    return figures


def _makespan(entry: Entry) -> float:
    return entry.makespan_s


def _busiest(entry: Entry) -> float:
    return entry.busiest_cpu_s


def _ratios(measured: Measured, rival: str, batches: Sequence[int], clock: Clock) -> list[float]:
    """Rival over ours, where both have a plan."""
    pairs = [(measured.entries[rival][b], measured.entries[OURS][b]) for b in batches]
    return [clock(theirs) / clock(ours) for theirs, ours in pairs if theirs is not None and ours is not None]


def _noise(measured: Measured, clock: Clock) -> list[float]:
    """How far ours is from itself: the same plan again, and equal placements of rivals."""
    found = []
    for b, ours in enumerate(measured.entries[OURS]):
        for name in (AGAIN, *measured.rivals):
            other = measured.entries[name][b]
            if ours is not None and other is not None and other.placement == ours.placement:
                found.append(abs(clock(other) / clock(ours) - 1.0))
    return found


def _over_best(measured: Measured, clock: Clock) -> dict[int, float]:
    """By batch: ours over the best rival that places differently."""
    found = {}
    for b, ours in enumerate(measured.entries[OURS]):
        rows = [measured.entries[rival][b] for rival in measured.rivals]
        times = [
            clock(r) for r in rows if r is not None and ours is not None and r.placement != ours.placement
        ]
        if ours is not None and times:
            found[b] = clock(ours) / min(times)
    return found


def _prediction_error(measured: Measured) -> float:
    """Mean absolute relative error of the predicted against the measured busiest rank, by CPU seconds."""
    rows = [row for entries in measured.entries.values() for row in entries if row is not None]
    return sum(abs(row.predicted_s / row.busiest_cpu_s - 1.0) for row in rows) / len(rows)


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
    if not uses_wall_clock(measured.ranks):
        clock = "CPU seconds of the busiest rank, since there are more ranks than cores"
    lines = [f"* {name}: {value:.4g}" for name, value in figures.items()]
    return "\n".join(
        [
            f"# Measured training steps on {measured.ranks} ranks, {about['date']}",
            "",
            f"**Measured** with `benchmarks/step.py`: {measured.ranks} processes on {about['cores']} cores "
            f"({about['processor']}, torch {about['torch']}), one core and one thread each, gloo, float32, a "
            f"two-layer Wan model. Makespan by {clock}. Medians over {measured.repeats} of "
            f"{2 * measured.repeats} interleaved steps: those that waited least for a core that something "
            "else held. *max/mean* and *predicted* (by the profile) are of CPU seconds; *queued* is the most "
            "that a step that counts waited for its core. Nothing here is a GPU's speed.",
            "",
            *_table(measured),
            "",
            f"`ratio_*` are rival over `exact`, medians over the {len(measured.dominated)} batches whose "
            f"dearest video has at least {DOMINANT_SHARE:.0%} of the price; `noise` is how far `exact` is "
            "from the same placement again; `worst_over_best_rival` compares with the best rival that places "
            "differently.",
            "",
            *lines,
            "",
        ]
    )


def _table(measured: Measured) -> list[str]:
    rows = [
        "| batch | share of the dearest | policy | makespan s | busiest CPU s | predicted s | over exact | "
        "max/mean | queued |",
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
                f"{entry.queued_share:.1%} |"
            )
    return rows
