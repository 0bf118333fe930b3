"""The work of a sequence by its length, as rivals estimate it: a L + b L^2, fitted to measured whole
sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """`linear` L + `quadratic` L^2, in microseconds.

    KnapFormer writes it as 24 L d^2 + gamma 4 L^2 d; only the ratio of the two terms matters, hence
    gamma = 6 d quadratic / linear.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    @classmethod
    def fit(cls, points: Sequence[tuple[int, int]]) -> Workload:
        """Ordinary least squares without intercept over (tokens, price) points; a term that would be
        negative is left out."""
        s2 = sum(float(x) ** 2 for x, _ in points)
        s3 = sum(float(x) ** 3 for x, _ in points)
        s4 = sum(float(x) ** 4 for x, _ in points)
        y1 = sum(float(x) * y for x, y in points)
        y2 = sum(float(x) ** 2 * y for x, y in points)
        determinant = s2 * s4 - s3 * s3
        if determinant > 1e-9 * s2 * s4:
            linear = (y1 * s4 - y2 * s3) / determinant
            quadratic = (y2 * s2 - y1 * s3) / determinant
            if linear > 0 and quadratic >= 0:
                return cls(linear, quadratic)
            if quadratic > 0:
                return cls(0.0, y2 / s4)
        return cls(y1 / s2, 0.0)

    def of(self, num_tokens: int) -> float:
        return self.linear * num_tokens + self.quadratic * float(num_tokens) ** 2

    def gamma(self, width: int) -> float:
        """KnapFormer's gamma for a model of that width; infinite where the linear term vanished."""
        return 6 * width * self.quadratic / self.linear if self.linear else float("inf")
