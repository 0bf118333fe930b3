"""Price of a shape that was not measured: alpha + beta L + gamma L^2, fitted per configuration and class.

Attention is in gamma; what acts on single tokens, and the bytes that a configuration exchanges, are in beta;
launches and the latency of its exchanges are in alpha.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from zellige_lightning.placement.plan import WHOLE, ParallelConfig

Points = Sequence[tuple[int, int]]  # (tokens, price) of each measurement
FitKey = tuple[ParallelConfig, str]
_POWERS = (1, 2, 0)  # preferred terms: one point alone gives a price proportional to the tokens


@dataclass(frozen=True)
class PriceFit:
    """Non-negative coefficients, so that a longer sequence is never cheaper. Prices are in microseconds."""

    alpha: float
    beta: float
    gamma: float

    @classmethod
    def of_points(cls, points: Points) -> PriceFit:
        """Least squares in relative error over (tokens, price) points, coefficients >= 0.

        With three terms it is enough to try every subset of terms and keep the best non-negative one.
        """
        distinct = len({tokens for tokens, _ in points})
        tokens, prices = np.array(points, dtype=np.float64).T
        scale = tokens.max()
        best, best_error = (0.0, 0.0, 0.0), float("inf")
        for size in range(1, min(3, distinct) + 1):
            for powers in combinations(_POWERS, size):
                rows = np.stack([(tokens / scale) ** p for p in powers], axis=1) / prices[:, None]
                found, *_ = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)
                error = float(((rows @ found - 1.0) ** 2).sum())
                if found.min() >= 0.0 and error < best_error - 1e-15:
                    terms = dict(zip(powers, found.tolist(), strict=True))
                    best = (terms.get(0, 0.0), terms.get(1, 0.0) / scale, terms.get(2, 0.0) / scale**2)
                    best_error = error
        return cls(*map(float, best))

    def price_us(self, num_tokens: int) -> int:
        """At least 1 us, since every option takes time."""
        return max(1, round(self.alpha + self.beta * num_tokens + self.gamma * num_tokens**2))

    def shared(self, degree: int) -> PriceFit:
        """The part of one of `degree` ranks, if sharing cost nothing."""
        return PriceFit(self.alpha, self.beta / degree, self.gamma / degree)

    def with_exchanges(self, points: Points) -> PriceFit:
        """This computation and what `points` cost beyond it: a latency and a time per token, which is all
        that one or two points can tell. Prices below it scale it instead."""
        excess = [
            (tokens, price - self.alpha - self.beta * tokens - self.gamma * tokens**2)
            for tokens, price in points
        ]
        if min(value for _, value in excess) <= 0.0:
            ratios = [price / max(1e-9, price - e) for (_, price), (_, e) in zip(points, excess, strict=True)]
            scale = sum(ratios) / len(ratios)
            return PriceFit(scale * self.alpha, scale * self.beta, scale * self.gamma)
        (low, first), (high, last) = min(excess), max(excess)
        slope = (last - first) / (high - low) if high > low else 0.0
        slope = min(max(0.0, slope), first / low)
        return PriceFit(self.alpha + first - slope * low, self.beta + slope, self.gamma)


def fit_all(points: Mapping[FitKey, Points]) -> dict[FitKey, PriceFit]:
    """A fit per configuration and class. Where that has only one or two points, its computation is taken from
    the whole sequences, so that a partial grid is still no straight line."""
    fits = {key: PriceFit.of_points(sorted(rows)) for key, rows in points.items()}
    whole = points.get((WHOLE, "node"), ())
    if len({tokens for tokens, _ in whole}) >= 3:
        for (config, where), rows in points.items():
            if not config.is_whole and len({tokens for tokens, _ in rows}) < 3:
                fits[config, where] = fits[WHOLE, "node"].shared(config.degree).with_exchanges(rows)
    return fits
