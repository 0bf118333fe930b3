"""What training taught about prices: factors per bucket, configuration and rank, in coarse levels.

A correction is one version of the prices. Plans are pure functions of (batch, price version, cap, topology,
the previous plan), so the same version always gives the same plans, and a plan cache outlives a step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from zellige_lightning.errors import ProfileError
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.cost import PriceKey, ProfileTable
from zellige_lightning.planner.problem import NOMINAL

LEVEL = 1.05  # factors are powers of it
MOST_LEVELS = 60  # about 18 times dearer or cheaper; beyond it no factor is believed
Name = TypeVar("Name")


def factor_of(level: int) -> float:
    return float(LEVEL**level)


@dataclass(frozen=True)
class PriceCorrection:
    """Levels n stand for factors `LEVEL**n`; those of a price add up.

    Args:
        overall: of every price, of starts, and of the fixed step cost.
        buckets: (name, level), sorted, none of them 0.
        keys: (bucket name, configuration, topology class), level; likewise.
        ranks: of each rank; empty where all are alike.
        noise: per mille that a predicted gain must exceed to be worth a change of plan.
    """

    overall: int = 0
    buckets: tuple[tuple[str, int], ...] = ()
    keys: tuple[tuple[PriceKey, int], ...] = ()
    ranks: tuple[int, ...] = ()
    noise: int = 0

    @cached_property
    def version(self) -> str:
        """Short digest; `0` of no correction."""
        if self == PriceCorrection():
            return "0"
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    @property
    def slowness(self) -> tuple[int, ...]:
        """Of each rank, per mille of ordinary time; empty where all are alike."""
        return tuple(round(NOMINAL * factor_of(n)) for n in self.ranks) if any(self.ranks) else ()

    def apply(self, table: ProfileTable) -> ProfileTable:
        """The table with corrected prices. What ranks differ in is no part of a table, see `OptionMenu`."""
        buckets, keys = dict(self.buckets), dict(self.keys)
        if not (buckets or keys or self.overall):
            return table

        def corrected(price_us: int, name: str, more: int = 0) -> int:
            return max(1, round(price_us * factor_of(self.overall + buckets.get(name, 0) + more)))

        prices = {k: corrected(price, k[0], keys.get(k, 0)) for k, price in table.prices_us.items()}
        extrapolated = {name: corrected(price, name) for name, price in table.extrapolated_us.items()}
        overall = factor_of(self.overall)
        return replace(
            table,
            prices_us=prices,
            extrapolated_us=extrapolated,
            fixed_us=round(table.fixed_us * overall),
            start_us={key: round(start * overall) for key, start in table.start_us.items()},
        )

    def to_json(self) -> str:
        keys = [[name, [c.q, c.h, c.k], where, level] for (name, c, where), level in self.keys]
        return json.dumps([self.overall, list(map(list, self.buckets)), keys, list(self.ranks), self.noise])

    @classmethod
    def from_json(cls, text: str) -> PriceCorrection:
        """Raises: ProfileError for anything that is not a correction."""
        try:
            overall, buckets, keys, ranks, noise = json.loads(text)
            return cls(
                _level(overall),
                tuple((_name(name), _level(level)) for name, level in buckets),
                tuple(
                    ((_name(name), ParallelConfig(*c), _name(where)), _level(level))
                    for name, c, where, level in keys
                ),
                tuple(map(_level, ranks)),
                _level(noise, 1000),
            )
        except (ValueError, TypeError) as error:
            raise ProfileError(
                f"a price correction that is none: {text[:80]!r}", fix="resume from another checkpoint"
            ) from error


def levels(values: Iterable[tuple[Name, int]]) -> tuple[tuple[Name, int], ...]:
    """Sorted, without those that say nothing."""
    return tuple(sorted((name, level) for name, level in values if level))


def _level(value: Any, most: int = 2 * MOST_LEVELS) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > most:
        raise ValueError(f"{value!r} is no level")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no name")
    return value
