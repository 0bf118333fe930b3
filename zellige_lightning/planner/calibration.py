"""Prices corrected by whole steps: what sequences cost beside others differs from what each costs by itself.

The terms are those of the table, so that they fold into it and every planner knows them:

    makespan = fixed + max over ranks of the sum over its sequences of whole * price + launch, or where split
                       split * share + overhead * (price - share) + launch
                     + the sum over its split blocks of overhead * start + exchange

The share of a split sequence is its part of the whole price; what goes beyond was measured of a sequence with
nothing beside it, where nothing hides exchanges and waiting. A block is what exchanges together: one
sequence, or all of a rank set that are split over as many heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from zellige_lightning.placement.plan import WHOLE, ParallelConfig, PlacementOption
from zellige_lightning.placement.schedule import split_blocks
from zellige_lightning.placement.sequence import Bucket
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.cost import ProfileTable

TERMS = ("fixed", "whole", "split", "overhead", "launch", "exchange")
# In the order in which they are tried. Without a scale of its own, overhead has that of splits, and they that
# of whole sequences.
MODELS: Mapping[str, tuple[str, ...]] = {
    "plain": (),
    "scale": ("fixed", "whole"),
    "two scales": ("fixed", "whole", "split"),
    "overheads": ("fixed", "whole", "split", "overhead"),
    "launches": ("fixed", "whole", "launch"),
    "exchanges": ("fixed", "whole", "exchange"),
    "all": TERMS,
}
# A further term must bring the error on plans that it has not seen below that share, and by so many points.
_WORTH, _WORTH_PCT = 0.97, 0.05
_LEAST_OVERHEAD = 0.05  # a scale; some of it is always left
_RANGE = (0.5, 2.0)  # of a scale; beyond it the steps were not those that the prices are for
_MOST_FIXED = 3.0  # times the fixed cost that was measured: a machine that was busy looks like a fixed cost
_ITERATIONS = 5


@dataclass(frozen=True)
class Observation:
    """A step that was run.

    Args:
        options, buckets: placement and shape of each of its sequences.
        measured_us: its makespan.
        batch: observations of one batch are left out together in cross-validation.
    """

    options: tuple[PlacementOption, ...]
    buckets: tuple[Bucket, ...]
    measured_us: float
    batch: int


@dataclass(frozen=True)
class Terms:
    """Corrections, see above; microseconds and factors."""

    fixed_us: float
    whole: float = 1.0
    split: float = 1.0
    overhead: float = 1.0
    launch_us: float = 0.0
    exchange_us: float = 0.0

    def price_us(self, price_us: float, whole_us: float, config: ParallelConfig) -> float:
        """The corrected price of a sequence that costs `whole_us` on one rank."""
        if config.is_whole:
            return self.whole * price_us + self.launch_us
        share = whole_us / config.degree
        own = self.split * share + self.overhead * (price_us - share) + self.launch_us
        return own if config.is_packed else own + self.exchange_us  # those in a pack share theirs

    def start_us(self, start_us: float) -> float:
        """The corrected start of a block that sequences share."""
        return self.overhead * start_us + self.exchange_us


@dataclass(frozen=True)
class Calibration:
    """What whole steps have taught.

    Args:
        model: the key of `MODELS` that was chosen.
        errors_pct: mean absolute error of each model, of plans of batches that it was not fitted to.
    """

    model: str
    terms: Terms
    errors_pct: Mapping[str, float]

    def applied_to(self, table: ProfileTable) -> ProfileTable:
        """The table with corrected prices."""

        wholes = {bucket.name: table.whole_us(bucket) for bucket in table.buckets}

        def corrected(us: int, name: str, config: ParallelConfig) -> int:
            return max(1, round(self.terms.price_us(us, wholes[name], config)))

        shared = {key[1:] for key in table.prices_us if key[1].is_packed and not key[1].is_whole}
        starts = {key: round(self.terms.start_us(table.start_us.get(key, 0))) for key in shared}
        return replace(
            table,
            prices_us={key: corrected(us, *key[:2]) for key, us in table.prices_us.items()},
            extrapolated_us={name: corrected(us, name, WHOLE) for name, us in table.extrapolated_us.items()},
            fixed_us=max(0, round(self.terms.fixed_us)),
            start_us={key: start for key, start in sorted(starts.items()) if start},
            split_scale=table.split_scale * self.terms.split / self.terms.whole,
            overhead_scale=table.overhead_scale * self.terms.overhead,
        )


def calibrate(table: ProfileTable, topology: Topology, observations: Sequence[Observation]) -> Calibration:
    """Terms from steps of mixed plans. A further term stays only if it lowers the error on batches that were
    left out, and by more than those batches differ in it by chance. Only that other work hides a part of the
    overhead is no surprise, and needs no such certainty."""
    fitted = [_Loads.of(table, topology, observation) for observation in observations]
    batches = [observation.batch for observation in observations]
    errors = {name: _left_out_errors(table, fitted, batches, name) for name in MODELS}
    chosen = "plain"
    for name, error in errors.items():
        if _is_better(error, errors[chosen], is_expected=name == "overheads"):
            chosen = name
    means = {name: float(error.mean()) if len(error) else 0.0 for name, error in errors.items()}
    return Calibration(chosen, fit_terms(table, fitted, MODELS[chosen]), means)


def _is_better(errors: np.ndarray, than: np.ndarray, is_expected: bool) -> bool:
    """Of two models' errors by batch: clearly, and surer than one standard error where it was not
    expected."""
    if len(errors) < 2:
        return False
    gains = than - errors
    sure = 0.0 if is_expected else gains.std(ddof=1) / len(gains) ** 0.5
    return bool(gains.mean() > max(_WORTH_PCT, (1.0 - _WORTH) * than.mean(), sure))


def held_out_errors(
    table: ProfileTable,
    topology: Topology,
    known: Sequence[Observation],
    unseen: Sequence[Observation],
) -> dict[str, tuple[float, float]]:
    """Mean absolute error and bias in % of `unseen`, of every model fitted to `known`."""
    seen = [_Loads.of(table, topology, step) for step in known]
    steps = [_Loads.of(table, topology, step) for step in unseen]
    found = {}
    for name, terms in ((name, fit_terms(table, seen, names)) for name, names in MODELS.items()):
        errors = np.array([step.makespan_us(terms) / step.measured_us - 1.0 for step in steps])
        found[name] = 100.0 * float(np.abs(errors).mean()), 100.0 * float(errors.mean())
    return found


@dataclass(frozen=True)
class _Loads:
    """By rank `[N, 6]`: what each of `TERMS` is multiplied with; and the measured makespan."""

    features: np.ndarray
    measured_us: float

    @classmethod
    def of(cls, table: ProfileTable, topology: Topology, step: Observation) -> _Loads:
        features = np.zeros((topology.world_size, len(TERMS)))
        features[:, 0] = 1.0
        for option, bucket in zip(step.options, step.buckets, strict=True):
            price = table.price_us(bucket, option.config, topology.class_of(option.ranks))
            assert price is not None, f"{bucket.name} under {option.config} was run without a price"
            ranks = list(option.ranks)
            if option.config.is_whole:
                features[ranks, 1] += price
            else:
                share = table.whole_us(bucket) / option.config.degree
                features[ranks, 2] += share
                features[ranks, 3] += price - share
            features[ranks, 4] += 1.0
        for option, _ in split_blocks(step.options):
            features[list(option.ranks), 5] += 1.0
        features[:, 3] += table.start_loads_us(step.options, topology)
        return cls(features, step.measured_us)

    def makespan_us(self, terms: Terms) -> float:
        return float((self.features @ _vector(terms)).max())

    def critical(self, terms: Terms) -> np.ndarray:
        """Features of the rank that these terms make the slowest."""
        return self.features[int((self.features @ _vector(terms)).argmax())]


def _vector(terms: Terms) -> np.ndarray:
    return np.array(
        [terms.fixed_us, terms.whole, terms.split, terms.overhead, terms.launch_us, terms.exchange_us]
    )


def fit_terms(table: ProfileTable, steps: Sequence[_Loads], names: Sequence[str]) -> Terms:
    """Least squares in relative error; which rank is the slowest follows from the terms, so this is repeated.
    Without names, or where a scale comes out absurd, the table as it is."""
    plain = terms = Terms(float(table.fixed_us))
    if not names or len(steps) <= len(names):
        return plain
    most_us = _MOST_FIXED * table.fixed_us
    for _ in range(_ITERATIONS):
        rows = np.stack([step.critical(terms) / step.measured_us for step in steps])
        found = _solve(rows, names, np.ones(len(rows)))
        if found is not None and found.fixed_us > most_us:
            rest = [name for name in names if name != "fixed"]
            found = _solve(rows, rest, 1.0 - most_us * rows[:, 0])
            found = None if found is None else replace(found, fixed_us=most_us)
        if found is None or not _is_sane(found):
            return plain
        if found == terms:
            break
        terms = found
    return terms


def _is_sane(terms: Terms) -> bool:
    low, high = _RANGE  # other work may hide most of an overhead
    return all(low <= scale <= high for scale in (terms.whole, terms.split)) and terms.overhead <= high


def _solve(rows: np.ndarray, names: Sequence[str], target: np.ndarray) -> Terms | None:
    """No term is negative: the best over all subsets of those that may vanish."""
    columns = [rows[:, TERMS.index(name)].copy() for name in names]
    if "overhead" not in names:  # it goes with splits, and they with whole sequences
        columns[names.index("split" if "split" in names else "whole")] += rows[:, 3]
    if "split" not in names:
        columns[names.index("whole")] += rows[:, 2]
    scales = [i for i, name in enumerate(names) if name in ("whole", "split")]
    others = [i for i in range(len(names)) if i not in scales]
    best, best_error = None, float("inf")
    for size in range(len(others) + 1):
        for chosen in combinations(others, size):
            used = [*scales, *chosen]
            matrix = np.stack([columns[i] for i in used], axis=1)
            found, *_ = np.linalg.lstsq(matrix, target, rcond=None)
            error = float(((matrix @ found - target) ** 2).sum())
            if found.min() >= 0.0 and error < best_error - 1e-12:
                best, best_error = {names[i]: float(x) for i, x in zip(used, found, strict=True)}, error
    if best is None:
        return None
    split = best.get("split", best["whole"])
    return Terms(
        best.get("fixed", 0.0),
        best["whole"],
        split,
        max(_LEAST_OVERHEAD, best.get("overhead", 0.0)) if "overhead" in names else split,
        best.get("launch", 0.0),
        best.get("exchange", 0.0),
    )


def _left_out_errors(
    table: ProfileTable, steps: Sequence[_Loads], batches: Sequence[int], name: str
) -> np.ndarray:
    """Mean absolute error in % of each batch, predicted by terms of the others."""
    errors = []
    for left_out in sorted(set(batches)):
        known = [step for step, batch in zip(steps, batches, strict=True) if batch != left_out]
        terms = fit_terms(table, known, MODELS[name])
        unseen = [step for step, batch in zip(steps, batches, strict=True) if batch == left_out]
        errors.append(np.mean([abs(step.makespan_us(terms) / step.measured_us - 1.0) for step in unseen]))
    return 100.0 * np.array(errors)
