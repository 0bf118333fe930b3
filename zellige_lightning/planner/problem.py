"""What a planner solves: groups of interchangeable sequences with priced choices, and how counts become
placements.

This is Eq. (1) in the compact form of Eq. (5): `Cell` says how many members of a group take one option.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zellige_lightning.placement.plan import ParallelConfig, PlacementOption

RankSet = tuple[int, ...]
NOMINAL = 1000  # slowness of an ordinary rank, per mille of its time


def slowed(price_us: int, slowness: int) -> int:
    """What work of that nominal price takes on ranks of that slowness, rounded up."""
    return -(-price_us * slowness // NOMINAL)


@dataclass(frozen=True)
class Choice:
    """One configuration at one price: j of Eq. (5), with its legal rank sets B.

    Args:
        config: (q, h, k).
        price_us: time per participating rank.
        memory_mib: memory per participating rank.
        rank_sets: legal rank sets, each of `config.degree` ascending ranks, all of one topology class and as
            slow as one another.
        traffic: bytes that its ranks exchange in a layer's forward, weighted by link class; breaks ties only.
        nominal_us: price on ranks of ordinary speed; 0 where that is `price_us`.
        start_us: what a rank pays once for all sequences of this configuration and rank set, beside their
            prices.
    """

    config: ParallelConfig
    price_us: int
    memory_mib: int
    rank_sets: tuple[RankSet, ...]
    traffic: int = 0
    nominal_us: int = 0
    start_us: int = 0

    @property
    def work_us(self) -> int:
        """Time per participating rank of ordinary speed."""
        return self.nominal_us or self.price_us

    @property
    def area_us(self) -> int:
        """Rank time that one sequence takes from the whole machine, at ordinary speed."""
        return self.config.degree * self.work_us


@dataclass(frozen=True)
class Group:
    """An ECF group: sequences with the same choices and coefficients. `members` are their indices,
    ascending; `num_tokens` is the length of each."""

    bucket: str
    members: tuple[int, ...]
    choices: tuple[Choice, ...]
    num_tokens: int = 0

    def __len__(self) -> int:
        return len(self.members)

    @property
    def whole(self) -> Choice | None:
        """The whole-sequence choice on the fastest ranks, if the group has one."""
        return next((c for c in self.choices if c.config.is_whole), None)

    def whole_by_rank(self) -> dict[int, int]:
        """Position in `choices` of the whole-sequence choice that each rank has."""
        wholes = ((j, c) for j, c in enumerate(self.choices) if c.config.is_whole)
        return {rank: j for j, choice in wholes for (rank,) in choice.rank_sets}


@dataclass(frozen=True)
class PlacementProblem:
    """One global batch (or a part of one) to place on `world_size` ranks with `cap_mib` each.

    Args:
        slowness: of each rank, per mille of ordinary time; empty where all are alike. A choice costs what the
            slowest rank of its rank sets needs: sharing ranks wait for one another in every layer.
    """

    world_size: int
    cap_mib: int
    groups: tuple[Group, ...]
    slowness: tuple[int, ...] = ()

    @property
    def num_sequences(self) -> int:
        return sum(map(len, self.groups))

    @property
    def slowness_by_rank(self) -> tuple[int, ...]:
        return self.slowness or (NOMINAL,) * self.world_size

    def capacity_us(self, limit: int) -> int:
        """Ordinary rank time that all ranks offer together up to a load of `limit`."""
        if not self.slowness:
            return self.world_size * limit
        return sum(limit * NOMINAL // slowness for slowness in self.slowness)


@dataclass(frozen=True, order=True)
class Cell:
    """u_{g,j,B} of Eq. (5): `count` members of group `group` take choice `choice` on `ranks`."""

    group: int
    choice: int
    ranks: RankSet
    count: int


def drop_dominated(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Choices that no other one of the same rank sets beats in price, with and without its start, and in
    memory. Exact: optima stay.

    Among equals the first stays.
    """
    kept: list[Choice] = []
    for choice in sorted(choices, key=_frugal_first):
        if not any(_beats(k, choice) and k.rank_sets == choice.rank_sets for k in kept):
            kept.append(choice)
    return tuple(kept)


def _beats(one: Choice, other: Choice) -> bool:
    """Of no higher price, in no respect the worse."""
    return (
        one.memory_mib <= other.memory_mib and one.price_us + one.start_us <= other.price_us + other.start_us
    )


def _frugal_first(choice: Choice) -> tuple[int, int, int, int, int, ParallelConfig]:
    costs = choice.price_us, choice.start_us, choice.memory_mib, choice.traffic
    return choice.config.degree, *costs, choice.config


def ungrouped(problem: PlacementProblem) -> PlacementProblem:
    """The direct formulation of Eq. (1): every sequence is a group of its own."""
    groups = tuple(replace(g, members=(m,)) for g in problem.groups for m in g.members)
    return replace(problem, groups=groups)


def decode(problem: PlacementProblem, cells: Iterable[Cell]) -> dict[int, tuple[Choice, PlacementOption]]:
    """One option per sequence from the counts: members in ascending order take the cells in ascending
    order."""
    waiting = [iter(group.members) for group in problem.groups]
    placed: dict[int, tuple[Choice, PlacementOption]] = {}
    for cell in sorted(cells):
        choice = problem.groups[cell.group].choices[cell.choice]
        option = PlacementOption(choice.config, cell.ranks)
        for _ in range(cell.count):
            placed[next(waiting[cell.group])] = choice, option
    return placed
