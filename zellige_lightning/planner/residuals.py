"""Measured over predicted: which part follows the rank, which the bucket, which the configuration.

The time of rank r in a step is modeled as

    M_r = exp(overall + rank_r) * rest_r + sum over cells on r of us * exp(overall + bucket + key + rank_s)

where s is the slowest rank of the cell's rank set. The logarithms are fitted by ridge regression on log(M /
predicted) with Huber weights, so that a spike moves nothing, and weights that halve with age, so that what
changed shows soon. The ridge shares out between causes what the data cannot tell apart; their sum is right
all the same.

Shape legend: R rows (one per step and rank), E entries (cell on a rank), U unknowns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from zellige_lightning.planner.cost import PriceKey
from zellige_lightning.planner.problem import RankSet

LEAST_STEPS = 4  # in which a bucket or a configuration must have run to be judged
HALF_LIFE = 6.0  # steps after which a measurement counts half
LEAST_SIGMA, HUBER = 0.01, 1.5  # relative error taken for granted; where a residual becomes an outlier
SPREADS = (1.0, 0.2, 0.1, 0.2)  # prior standard deviations: overall, bucket, key, rank
UNJUDGED = 1e-4  # the same of what has run in too few steps
WORST = 0.5  # a residual counts as that much at most where corrections are compared
ROUNDS, CONVERGED = 12, 2e-3
MOST_ROWS = 4096  # older steps of many ranks add little
MOST_JUDGED = 64  # ranks that may be slow or fast at once: those that stand out most

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Observation:
    """One measured step.

    Args:
        step: number of the global batch.
        cells: (price key, rank set, microseconds of all its sequences on each of these ranks) as measured by
            the profile; the key is None for shapes outside the catalog.
        rest_us: per rank, what it is predicted to take beyond its cells.
        measured_us: per rank.
        predicted_us, makespan_us: of the step, with the prices that it was planned with.
    """

    step: int
    cells: tuple[tuple[PriceKey | None, RankSet, int], ...]
    rest_us: tuple[int, ...]
    measured_us: tuple[int, ...]
    predicted_us: int
    makespan_us: int

    @property
    def error_permille(self) -> int:
        return 1000 * abs(self.predicted_us - self.makespan_us) // max(1, self.makespan_us)


@dataclass(frozen=True)
class Causes:
    """Natural logarithms of factors, by cause.

    Args:
        noise: how far the residuals of the ranks of one step scatter about their mean (a share of the time).
            What a step's ranks have in common does not count: it cancels between two plans for one batch.
    """

    overall: float
    buckets: dict[str, float]
    keys: dict[PriceKey, float]
    ranks: tuple[float, ...]
    noise: float


class Design:
    """The observations as flat arrays."""

    def __init__(self, observations: Sequence[Observation]) -> None:
        self.world = world = len(observations[0].measured_us)
        kept = observations[-max(LEAST_STEPS, MOST_ROWS // world) :]
        self.key_steps = Counter(k for o in kept for k in {k for k, _, _ in o.cells if k})
        self.bucket_steps = Counter(b for o in kept for b in {k[0] for k, _, _ in o.cells if k})
        self.keys, self.buckets = sorted(self.key_steps), sorted(self.bucket_steps)
        column = {name: 1 + n for n, name in enumerate(self.buckets)}
        column_of_key = {key: 1 + len(column) + n for n, key in enumerate(self.keys)}
        self.first_rank = 1 + len(column) + len(column_of_key)
        self.measured = np.array([m for o in kept for m in o.measured_us], dtype=float).clip(1)
        self.rest = np.array([m for o in kept for m in o.rest_us], dtype=float).clip(0)
        ages = np.repeat(np.arange(len(kept))[::-1], world)
        largest = self.measured.reshape(-1, world).max(1).repeat(world)
        self.weight = 0.5 ** (ages / HALF_LIFE) * self.measured / largest
        rows, buckets, keys, us, own, sets = [], [], [], [], [], []
        self.rank_sets: list[RankSet] = []
        place: dict[RankSet, int] = {}
        for n, observation in enumerate(kept):
            for key, ranks, amount in observation.cells:
                s = place.setdefault(ranks, len(place))
                for rank in ranks:
                    rows.append(n * world + rank)
                    buckets.append(column.get(key[0], -1) if key else -1)
                    keys.append(column_of_key.get(key, -1) if key else -1)
                    us.append(amount)
                    own.append(rank)
                    sets.append(s)
        self.rank_sets = list(place)
        self.rows, self.own, self.sets = np.array(rows, int), np.array(own, int), np.array(sets, int)
        self.columns = np.array([buckets, keys], int)
        self.us = np.array(us, float)
        self.judged, self.size = np.arange(world), self.first_rank + world
        if world > MOST_JUDGED:
            self._judge_few()

    def _judge_few(self) -> None:
        error = np.log(self.measured / self.predict(np.zeros(self.size))[0]).reshape(-1, self.world)
        apart = np.abs(np.median(error - np.median(error), axis=0))
        self.judged = np.sort(np.argsort(-apart, kind="stable")[:MOST_JUDGED])
        self.size = self.first_rank + len(self.judged)

    def ranks_of(self, theta: Floats) -> Floats:
        """[N]: 0 for ranks that are not judged."""
        ranks = np.zeros(self.world)
        ranks[self.judged] = theta[self.first_rank : self.size]
        return ranks

    def predict(self, theta: Floats) -> tuple[Floats, Floats]:
        """([R] predicted, [R, U] derivative of its logarithm)."""
        total, share, who, rest = self._times(theta, self.ranks_of(theta))
        column_of_rank = np.full(self.world, -1)
        column_of_rank[self.judged] = np.arange(self.first_rank, self.size)
        flat = np.zeros(len(total) * self.size)
        for column in (*self.columns, column_of_rank[who]):
            there = column >= 0
            place = self.rows[there] * self.size + column[there]
            flat += np.bincount(place, share[there], len(flat))
        slope = flat.reshape(len(total), self.size)
        slope[:, 0] = 1.0
        column = np.tile(column_of_rank, len(total) // self.world)
        there = column >= 0
        slope[np.flatnonzero(there), column[there]] += (rest / total)[there]
        return total, slope

    def _times(self, theta: Floats, ranks: Floats) -> tuple[Floats, Floats, NDArray[np.int64], Floats]:
        """([R] predicted, [E] share of each entry in its row, [E] the rank whose pace it has, [R] rest)."""
        slowest = np.array([max(s, key=lambda r: ranks[r]) for s in self.rank_sets], int)
        who = slowest[self.sets] if len(self.sets) else self.own
        who = np.where(ranks[who] > ranks[self.own], who, self.own)
        exponent = theta[0] + ranks[who]
        for column in self.columns:
            exponent = exponent + np.where(column >= 0, theta[column.clip(0)], 0.0)
        time_us = self.us * np.exp(exponent)
        all_ranks = np.tile(np.arange(self.world), len(self.measured) // self.world)
        rest = self.rest * np.exp(theta[0] + ranks[all_ranks])
        total = (np.bincount(self.rows, time_us, len(self.measured)) + rest).clip(1.0)
        return total, time_us / total[self.rows], who, rest

    @property
    def num_effective(self) -> float:
        """Of how many equally weighted rows the weighted ones are worth."""
        return float(self.weight.sum() ** 2 / (self.weight**2).sum())

    def spreads(self) -> Floats:
        """[U] prior standard deviations."""
        overall, bucket, key, rank = SPREADS
        return np.array(
            [
                overall,
                *(bucket if self.bucket_steps[b] >= LEAST_STEPS else UNJUDGED for b in self.buckets),
                *(key if self.key_steps[k] >= LEAST_STEPS else UNJUDGED for k in self.keys),
                *[rank] * len(self.judged),
            ]
        )

    def error(self, causes: Causes) -> float:
        """Mean absolute logarithm of measured over predicted, the largest rank times and the newest steps
        counting most."""
        theta = np.zeros(self.first_rank + self.world)
        theta[0] = causes.overall
        theta[1 : self.first_rank] = [
            *(causes.buckets.get(b, 0.0) for b in self.buckets),
            *(causes.keys.get(k, 0.0) for k in self.keys),
        ]
        total = self._times(theta, np.array(causes.ranks or (0.0,) * self.world))[0]
        off = np.abs(np.log(self.measured / total)).clip(max=WORST)
        return float(np.average(off, weights=self.weight))


def find_causes(observations: Sequence[Observation]) -> Causes:
    """What explains the observations, the last of which is the newest. All are of one world."""
    return explain(Design(observations))


def explain(design: Design) -> Causes:
    """The same, of observations as arrays."""
    theta, prior = np.zeros(design.size), design.spreads() ** -2.0
    error = np.zeros(len(design.measured))
    for _ in range(ROUNDS):
        predicted, slope = design.predict(theta)
        error = np.log(design.measured / predicted)
        sigma = max(LEAST_SIGMA, 1.4826 * float(np.median(np.abs(error))))
        weight = design.weight * np.minimum(1.0, HUBER * sigma / np.abs(error).clip(1e-12))
        normal = (slope.T * weight) @ slope + np.diag(sigma**2 * prior)
        step = np.linalg.solve(normal, (slope.T * weight) @ error - sigma**2 * prior * theta)
        theta = theta + step.clip(-1.0, 1.0)
        if np.abs(step).max() < CONVERGED:
            break
    return _separate(design, theta, _noise(error.reshape(-1, design.world)))


def _noise(errors: Floats) -> float:
    """[steps, ranks] -> one figure."""
    world = errors.shape[1]
    apart = np.abs(errors - errors.mean(1, keepdims=True)) * (world / max(1, world - 1)) ** 0.5
    return float(1.4826 * np.median(apart))


def _separate(design: Design, theta: Floats, noise: float) -> Causes:
    """Moves what many have in common to where it belongs, so that few factors differ from 1: from the keys to
    their bucket, from buckets and ranks to all prices."""
    ends = list(accumulate((1, len(design.buckets), len(design.keys))))
    overall, buckets, keys = np.split(theta[: ends[-1]].copy(), ends[:-1])
    ranks = design.ranks_of(theta)
    for n, name in enumerate(design.buckets):
        inside = [i for i, key in enumerate(design.keys) if key[0] == name]
        if inside:
            common = _lower_median(keys[inside])
            keys[inside] -= common
            buckets[n] += common
    common = _lower_median(ranks)
    ranks, overall = ranks - common, overall + common
    if len(buckets):
        common = _lower_median(np.append(buckets, -overall))
        buckets, overall = buckets - common, overall + common
    return Causes(
        float(overall[0]),
        dict(zip(design.buckets, buckets.tolist(), strict=True)),
        dict(zip(design.keys, keys.tolist(), strict=True)),
        tuple(ranks.tolist()),
        noise,
    )


def _lower_median(values: Floats) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])
