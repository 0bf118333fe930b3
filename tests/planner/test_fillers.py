"""Filler Packing by hand and against the literal rule (paper, Eq. (8))."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings, strategies as st

from zellige_lightning.planner.fillers import FillerGroup, FillerOverflowError, pack_fillers


def literal(
    groups: list[FillerGroup], loads: list[int], memory: list[int], total: int, cap: int
) -> tuple[dict[int, int], int | None]:
    """Eq. (8) sequence by sequence with fractions, and the first filler that no rank can take."""
    floor = Fraction(total, len(loads))
    loads, memory, placed = loads[:], memory[:], {}
    for group in sorted(groups, key=lambda g: (-g.price_us, g.members[0])):
        for member in group.members:
            scores = {}
            for r in range(len(loads)):
                if cap - memory[r] >= group.memory_mib:
                    time_slack = (floor - loads[r] - group.price_us) / floor
                    memory_slack = Fraction(cap - memory[r] - group.memory_mib, cap)
                    scores[r] = min(time_slack, memory_slack)
            if not scores:
                return placed, member
            best = min(scores, key=lambda r: (-scores[r], r))
            placed[member] = best
            loads[best] += group.price_us
            memory[best] += group.memory_mib
    return placed, None


def test_two_ranks_by_hand() -> None:
    # Anchors left loads (60, 0) and memory (0, 6) of 10; F = (60 + 40 + 20) / 2 = 60.
    # 40 us, 3 MiB: rank 0 min(-40/60, 7/10), rank 1 min(20/60, 1/10): rank 1, although its memory is tight.
    # 20 us, 2 MiB: rank 1 has 1 MiB left, so rank 0.
    loads, memory = [60, 0], [0, 6]
    groups = [FillerGroup((1,), 20, 2), FillerGroup((0,), 40, 3)]
    assert pack_fillers(groups, loads, memory, 120, 10) == {0: 1, 1: 0}
    assert (loads, memory) == ([80, 40], [2, 9])


def test_the_tighter_resource_decides() -> None:
    # Rank 0 is empty in time but nearly full in memory: slack 0.05 of memory against 0.2 of time on rank 1.
    assert pack_fillers([FillerGroup((0,), 10, 5)], [0, 70], [90, 0], 200, 100) == {0: 1}


def test_ties_take_the_lowest_rank() -> None:
    assert pack_fillers([FillerGroup((0, 1, 2), 5, 1)], [0] * 3, [0] * 3, 15, 10) == {0: 0, 1: 1, 2: 2}


def test_what_fits_nowhere_is_named() -> None:
    with pytest.raises(FillerOverflowError) as caught:
        pack_fillers([FillerGroup((4, 9), 5, 6)], [0, 0], [0, 5], 10, 10)
    assert (caught.value.member, caught.value.need_mib, caught.value.most_free_mib) == (9, 6, 5)


filler_sets = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=4
)


@settings(deadline=None)
@given(filler_sets, st.lists(st.tuples(st.integers(0, 80), st.integers(0, 30)), min_size=1, max_size=5))
def test_packing_by_group_is_literally_eq_8(
    counts: list[tuple[int, int, int]], ledgers: list[tuple[int, int]]
) -> None:
    groups, start = [], 0
    for count, price, memory in counts:
        groups.append(FillerGroup(tuple(range(start, start + count)), price, memory))
        start += count
    loads, memory = [a for a, _ in ledgers], [b for _, b in ledgers]
    total = sum(loads) + sum(len(g.members) * g.price_us for g in groups)
    expected, unplaced = literal(groups, loads, memory, total, 40)
    if unplaced is None:
        assert pack_fillers(groups, loads, memory, total, 40) == expected
        return
    with pytest.raises(FillerOverflowError) as caught:
        pack_fillers(groups, loads, memory, total, 40)
    assert caught.value.member == unplaced
