"""Which ranks, and which blocks of ranks, may be exchanged without changing the legal rank sets."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from zellige_lightning.planner.problem import RankSet

Family = tuple[RankSet, ...]


def _keeps(image: dict[int, int], family: Family, members: frozenset[RankSet]) -> bool:
    return all(tuple(sorted(image.get(r, r) for r in ranks)) in members for ranks in family)


@lru_cache(maxsize=64)
def _twins(world: int, families: frozenset[Family]) -> tuple[int, ...]:
    checked = [(f, frozenset(f)) for f in families]
    twin = list(range(world))
    for rank in range(1, world):
        for other in range(rank):
            if twin[other] == other and all(_keeps({rank: other, other: rank}, *f) for f in checked):
                twin[rank] = other
                break
    return tuple(twin)


def twin_classes(world: int, families: Iterable[Family]) -> tuple[int, ...]:
    """Per rank the lowest rank that it may be exchanged with. Exchanges of two ranks that keep every
    family form a group, so this is an equivalence."""
    return _twins(world, frozenset(families))


@lru_cache(maxsize=64)
def _swaps(world: int, families: frozenset[Family]) -> tuple[tuple[int, int, int], ...]:
    checked = [(f, frozenset(f)) for f in families]
    found = []
    for length in range(2, world // 2 + 1):
        for first in range(0, world - 2 * length + 1, length):
            second = first + length
            image = {first + x: second + x for x in range(length)} | {
                second + x: first + x for x in range(length)
            }
            if all(_keeps(image, *f) for f in checked):
                found.append((first, second, length))
    return tuple(found)


def block_swaps(world: int, families: Iterable[Family]) -> tuple[tuple[int, int, int], ...]:
    """(first, second, length) of neighbouring blocks that may be exchanged as a whole; needless where all
    ranks are twins."""
    families = frozenset(families)
    return () if len(set(_twins(world, families))) == 1 else _swaps(world, families)
