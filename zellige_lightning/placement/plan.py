"""Where each sequence runs: configurations (q, h, k), placement options, and the plan of a global batch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.sequence import digest63


@dataclass(frozen=True, slots=True, order=True)
class ParallelConfig:
    """Split factors over the query, head and key/value axes (paper, Sec. IV-A): theta = (q, h, k)."""

    q: int = 1
    h: int = 1
    k: int = 1

    def __post_init__(self) -> None:
        if min(self.q, self.h, self.k) < 1:
            raise PlanningError(f"split factors must be >= 1, got {self}")

    @property
    def degree(self) -> int:
        """Split degree lambda = q*h*k: the number of ranks that share one sequence."""
        return self.q * self.h * self.k

    @property
    def is_whole(self) -> bool:
        return self.degree == 1

    @property
    def is_packed(self) -> bool:
        """Whole, or split over heads only: sequences on the same ranks run in one attention call."""
        return self.q == self.k == 1

    def __str__(self) -> str:
        return f"({self.q},{self.h},{self.k})"


WHOLE = ParallelConfig(1, 1, 1)


@dataclass(frozen=True, slots=True, order=True)
class PlacementOption:
    """A configuration on a rank set: c = (theta_c, R_c). `ranks` ascend; position p holds shard p."""

    config: ParallelConfig
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if list(self.ranks) != sorted(set(self.ranks)) or not self.ranks or self.ranks[0] < 0:
            raise PlanningError(
                f"rank set {self.ranks} is not ascending and free of doubles",
                fix="process groups sort their ranks, so an unsorted rank set would permute the shards",
            )
        if len(self.ranks) != self.config.degree:
            raise PlanningError(
                f"configuration {self.config} needs {self.config.degree} ranks, got {self.ranks}"
            )


def whole(rank: int) -> PlacementOption:
    """The whole-sequence option on one rank."""
    return PlacementOption(WHOLE, (rank,))


@dataclass(frozen=True, slots=True)
class Filling:
    """How many of a rank's whole sequences, in buffer order, run in which pause of a pass.

    A pause is a moment at which the rank has started an exchange of one of its split blocks and would wait
    for it; they are counted over its split blocks in order. Sequences that are not named run at the end.

    Args:
        forward, backward: (pause, number of sequences), pauses ascending.
    """

    forward: tuple[tuple[int, int], ...] = ()
    backward: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Plan:
    """One placement option per sequence of a global batch, with what was predicted and proven about it.

    Args:
        step: the global batch that it is for.
        world_size: number of ranks N.
        options: `options[i]` places the sequence of index i.
        loads_us: predicted time per rank (sum of prices), microseconds.
        memory_mib: predicted memory per rank, MiB.
        fixed_us: placement-independent step cost, to be added to the largest load.
        lower_bound_us: proven lower bound of the largest load, and `bound_source` that names the proof.
        anchors: indices of the sequences that Eq. (4) calls anchors.
        planner: name of the planner or policy.
        statuses: status of each round of the solve, such as `OPTIMAL`.
        split_bound: no placement within epsilon of the bound has fewer splits; 0 where nothing was proven.
        nodes: search nodes.
        filling: of each rank; empty where nobody planned it. Not part of the digest either.
        solve_ms: time to produce the plan, model build included. Not part of the digest.
        price_version: of the corrected prices; `0` for prices as measured.
    """

    step: int
    world_size: int
    options: tuple[PlacementOption, ...]
    loads_us: tuple[int, ...]
    memory_mib: tuple[int, ...]
    fixed_us: int = 0
    lower_bound_us: int = 0
    bound_source: str = "none"
    anchors: tuple[int, ...] = ()
    planner: str = "given"
    statuses: tuple[str, ...] = ()
    solve_ms: float = 0.0
    split_bound: int = 0
    nodes: int = 0
    filling: tuple[Filling, ...] = ()
    price_version: str = "0"

    @property
    def makespan_us(self) -> int:
        """Largest predicted rank load, without the fixed step cost."""
        return max(self.loads_us, default=0)

    @property
    def predicted_us(self) -> int:
        """Predicted step makespan: the largest load plus the fixed step cost."""
        return self.makespan_us + self.fixed_us

    @property
    def imbalance(self) -> float:
        """Largest over mean rank load (1.0 is ideal)."""
        mean = sum(self.loads_us) / max(1, len(self.loads_us))
        return self.makespan_us / mean if mean else 1.0

    @property
    def num_splits(self) -> int:
        return sum(not option.config.is_whole for option in self.options)

    @property
    def gap(self) -> float:
        """Certified relative distance to the bound; infinite without a bound."""
        if self.lower_bound_us <= 0:
            return 0.0 if self.makespan_us == 0 else float("inf")
        return self.makespan_us / self.lower_bound_us - 1.0

    @property
    def rank_sets(self) -> set[tuple[int, ...]]:
        """The distinct rank sets of split sequences."""
        return {option.ranks for option in self.options if not option.config.is_whole}

    @cached_property
    def digest(self) -> int:
        """63-bit hash of the placement itself; ranks compare it before the first exchange of a step."""
        return digest63(
            f"{self.step}|{self.world_size}|" + "|".join(f"{o.config}{o.ranks}" for o in self.options)
        )

    def to_json(self) -> str:
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["options"] = [[asdict(o.config), list(o.ranks)] for o in self.options]
        data["filling"] = [[f.forward, f.backward] for f in self.filling]
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        data: dict[str, Any] = json.loads(text)
        data["options"] = tuple(_option(i, entry) for i, entry in enumerate(data["options"]))
        for name in ("loads_us", "memory_mib", "anchors", "statuses"):
            data[name] = tuple(data[name])
        data["filling"] = tuple(Filling(*map(_pairs, both)) for both in data.get("filling", ()))
        return cls(**data)


def _pairs(rows: Iterable[Iterable[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((pause, count) for pause, count in rows)


def _option(index: int, entry: Any) -> PlacementOption:
    try:
        config, ranks = entry
        return PlacementOption(ParallelConfig(**config), tuple(ranks))
    except PlanningError as error:
        error.message = f"sequence {index} split {tuple(config.values())}: {error.message}"
        raise
    except (TypeError, ValueError) as error:
        raise PlanningError(f"sequence {index}: {entry!r} is no configuration and rank set") from error


def rank_sums(options: Iterable[PlacementOption], amounts: Iterable[int], world_size: int) -> tuple[int, ...]:
    """Eq. (6): per rank, the sum of `amounts[i]` over the sequences whose rank set contains it."""
    sums = [0] * world_size
    for option, amount in zip(options, amounts, strict=True):
        for rank in option.ranks:
            sums[rank] += amount
    return tuple(sums)
