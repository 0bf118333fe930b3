"""How good predictions are, from rows of one plan each: errors, their intervals, and whether plans of one
batch come in the right order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import numpy as np

SMALLEST_SPREAD = 0.20  # of the measured times of a batch's plans: below it there is no order to find
_DRAWS = 2000


def calmer(times: Sequence[float], lost: Sequence[float]) -> list[float]:
    """The half of the repeats that lost least to what else the machine did. All of them where they lost
    alike."""
    most = median(lost)
    return [time for time, share in zip(times, lost, strict=True) if share <= most]


def settled(times: Sequence[float], lost: Sequence[float]) -> float:
    """Median of the calmer half of the repeats."""
    return median(calmer(times, lost))


@dataclass(frozen=True)
class Row:
    """One plan, predicted and measured.

    Args:
        batch: plans of one batch are compared with each other.
        kind: how the plan was made.
        digest: of the placement.
        held_out: neither prices nor terms have seen it.
        splits: sequences that are split; mixed: some rank holds shards beside whole sequences.
        predicted_s, predicted_cpu_s: makespan by wall clock, and processor seconds of the busiest rank.
        wall_s, cpu_s: of every repeat; lost: largest share of it that a rank lost to what else
            the machine did.
        again_wall_s, again_cpu_s, again_lost: the same of a few plans that are not held out, once more
            between the steps of those that are.
        memory_mib: largest rank, with parameters, gradients and optimizer state; measured of held-out plans
            only. predicted_mib: what the memory model says of it.
    """

    batch: int
    kind: str
    digest: int
    held_out: bool
    splits: int
    mixed: bool
    predicted_s: float
    predicted_cpu_s: float
    wall_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    lost: tuple[float, ...]
    memory_mib: float | None
    predicted_mib: float
    again_wall_s: tuple[float, ...] = ()
    again_cpu_s: tuple[float, ...] = ()
    again_lost: tuple[float, ...] = ()

    def measured(self, clock: str = "wall") -> float:
        return settled(self.wall_s if clock == "wall" else self.cpu_s, self.lost)

    def halves(self, clock: str = "wall") -> tuple[float, float]:
        """Medians of odd and of even repeats, among the calmer ones."""
        repeats = calmer(self.wall_s if clock == "wall" else self.cpu_s, self.lost)
        return median(repeats[::2]), median(repeats[1::2] or repeats)

    def drift(self, clock: str = "wall") -> float | None:
        """How much slower the same steps were when they were measured again; None where they were not."""
        if not self.again_lost:
            return None
        again = settled(self.again_wall_s if clock == "wall" else self.again_cpu_s, self.again_lost)
        return again / self.measured(clock) - 1.0

    def predicted(self, clock: str = "wall") -> float:
        return self.predicted_s if clock == "wall" else self.predicted_cpu_s

    @property
    def memory_error(self) -> float:
        assert self.memory_mib is not None, "the memory of this plan was not measured"
        return self.predicted_mib / self.memory_mib - 1.0

    def error(self, clock: str = "wall") -> float:
        """Relative and signed: positive where too much was predicted."""
        return self.predicted(clock) / self.measured(clock) - 1.0


def mape(errors: Iterable[float]) -> float:
    return 100.0 * mean(map(abs, errors))


def interval(rows: Sequence[Row], figure: Callable[[Sequence[Row]], float]) -> tuple[float, float]:
    """95 % of `figure` over draws of whole batches with replacement: plans of a batch are not independent."""
    batches = sorted({row.batch for row in rows})
    members = {b: [row for row in rows if row.batch == b] for b in batches}
    generator = np.random.default_rng(0)
    drawn = [
        figure([row for b in generator.choice(batches, len(batches)) for row in members[int(b)]])
        for _ in range(_DRAWS)
    ]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def ranks_of(values: Sequence[float]) -> np.ndarray[Any, Any]:
    """Places in ascending order from 0; equal values share their mean place."""
    array = np.asarray(values)
    return np.array([(array < v).sum() + ((array == v).sum() - 1) / 2 for v in array])


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    x, y = ranks_of(a), ranks_of(b)
    return float(np.corrcoef(x, y)[0, 1]) if x.std() and y.std() else 0.0


def pairwise(rows: Sequence[Row], clock: str, low: float, high: float = float("inf")) -> list[bool]:
    """For each pair of plans whose measured times are between `low` and `high` apart: whether the prediction
    orders them rightly."""
    found = []
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            fast, slow = sorted((a, b), key=lambda row: row.measured(clock))
            if low <= slow.measured(clock) / fast.measured(clock) - 1.0 < high:
                found.append(fast.predicted(clock) < slow.predicted(clock))
    return found


@dataclass(frozen=True)
class Order:
    """How well the plans of one batch are ordered."""

    spearman: float
    pairwise_5pct: float | None
    regret_pct: float
    top3: bool


def order_of(rows: Sequence[Row], clock: str) -> Order | None:
    """None where the measured times are too close together to tell."""
    times = [row.measured(clock) for row in rows]
    if len(rows) < 3 or max(times) / min(times) - 1.0 < SMALLEST_SPREAD:
        return None
    chosen = min(rows, key=lambda row: row.predicted(clock))
    best3 = sorted(rows, key=lambda row: row.predicted(clock))[:3]
    pairs = pairwise(rows, clock, 0.05)
    return Order(
        spearman(times, [row.predicted(clock) for row in rows]),
        mean(pairs) if pairs else None,
        100.0 * (chosen.measured(clock) / min(times) - 1.0),
        min(times) in [row.measured(clock) for row in best3],
    )


def orders(rows: Sequence[Row], clock: str) -> list[Order]:
    batches = sorted({row.batch for row in rows})
    found = (order_of([row for row in rows if row.batch == b], clock) for b in batches)
    return [order for order in found if order is not None]


def error_correlation(rows: Sequence[Row], clock: str) -> float:
    """Share of the variance of errors that plans of one batch have in common: what they share cancels when
    they are compared (intraclass correlation, one-way analysis of variance)."""
    groups = [[r.error(clock) for r in rows if r.batch == b] for b in sorted({r.batch for r in rows})]
    groups = [group for group in groups if len(group) > 1]
    if len(groups) < 2:
        return 0.0
    size, everything = mean(map(len, groups)), [e for group in groups for e in group]
    between = size * sum((mean(g) - mean(everything)) ** 2 for g in groups) / (len(groups) - 1)
    within = sum((e - mean(g)) ** 2 for g in groups for e in g) / (len(everything) - len(groups))
    total = between + (size - 1) * within
    return (between - within) / total if total else 0.0


def repeat_noise_pct(rows: Sequence[Row], clock: str = "wall") -> float:
    """How far two medians of the same plan are apart on average: odd against even repeats."""
    pairs = [abs(odd / even - 1.0) for odd, even in (row.halves(clock) for row in rows)]
    return 100.0 * mean(pairs) if pairs else 0.0


def drift_pct(rows: Sequence[Row], clock: str = "wall") -> float:
    """How much slower the machine became between the plans that prices are fitted to and the held-out ones.
    No price can know it: it is part of every error, as a bias."""
    drifts = [drift for row in rows if (drift := row.drift(clock)) is not None]
    return 100.0 * mean(drifts) if drifts else 0.0


def repeat_spearman(rows: Sequence[Row], clock: str = "wall") -> float:
    """Rank correlation of odd with even repeats within batches, averaged: what the order of plans is worth
    that was measured, and so what a perfect prediction would reach at most."""
    found = []
    for batch in sorted({row.batch for row in rows}):
        members = [row for row in rows if row.batch == batch]
        if order_of(members, clock) is not None:
            odd, even = zip(*(row.halves(clock) for row in members), strict=True)
            found.append(spearman(odd, even))
    return mean(found) if found else 0.0


def figures(rows: Sequence[Row], profiling_seconds: float, clock: str = "wall") -> dict[str, float]:
    """The published figures, of held-out plans only."""
    held = [row for row in rows if row.held_out]
    errors = [row.error(clock) for row in held]
    low, high = interval(held, lambda drawn: mape(row.error(clock) for row in drawn))
    memory = [row.memory_error for row in held]
    found = orders(held, clock)
    pairs = [order.pairwise_5pct for order in found if order.pairwise_5pct is not None]
    return {
        "rows": len(rows),
        "plans": len({(row.batch, row.digest) for row in rows}),
        "held_out": len(held),
        "makespan_mape_pct": mape(errors),
        "makespan_mape_low": low,
        "makespan_mape_high": high,
        "makespan_mae_s": mean(abs(row.predicted(clock) - row.measured(clock)) for row in held),
        "makespan_bias_pct": 100.0 * mean(errors),
        "memory_mape_pct": mape(memory),
        "memory_mae_gib": mean(
            abs(row.predicted_mib * row.memory_error / (1.0 + row.memory_error)) for row in held
        )
        / 1024,
        "memory_worst_under_pct": 100.0 * max(0.0, -min(memory)),
        "spearman": mean(order.spearman for order in found) if found else 0.0,
        "pairwise_accuracy_5pct": mean(pairs) if pairs else 0.0,
        "top1_regret_pct": mean(order.regret_pct for order in found) if found else 0.0,
        "top3_accuracy": mean(order.top3 for order in found) if found else 0.0,
        "error_correlation": error_correlation(held, clock),
        "repeat_noise_pct": repeat_noise_pct(held, clock),
        "drift_pct": drift_pct(rows, clock),
        "repeat_spearman": repeat_spearman(held, clock),
        "profiling_seconds": profiling_seconds,
    }
