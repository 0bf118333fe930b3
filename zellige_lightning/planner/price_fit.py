"""Price of a shape that was not measured: alpha + beta L + gamma L^2, fitted per configuration and class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

_POWERS = (1, 2, 0)  # preferred terms: one point alone gives a price proportional to the tokens


@dataclass(frozen=True)
class PriceFit:
    """Non-negative coefficients, so that a longer sequence is never cheaper. Prices are in microseconds."""

    alpha: float
    beta: float
    gamma: float

    @classmethod
    def of_points(cls, points: Sequence[tuple[int, int]]) -> PriceFit:
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
