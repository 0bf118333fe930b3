"""The parts of the compiled search: memo keys, packing by groups, relief."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st

from zellige_lightning.planner.compiled import buffer, zeros
from zellige_lightning.planner.fillers import FillerGroup, FillerOverflowError, pack_fillers
from zellige_lightning.planner.sand_kernel import DENSE, EQ_8, MEMORY_ONLY, pack_group, pack_sand, relieve
from zellige_lightning.planner.search_kernel import dual, is_new, write_key

ledgers = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 30)), min_size=1, max_size=6)


def sizes(world: int, swaps: int = 0, memo: int = 8) -> object:
    return buffer([world, 0, 0, 0, swaps, memo, 1, 1, 0])


def key_of(loads: list[int], mems: list[int], twins: list[int], swaps: list[int]) -> tuple[int, list[int]]:
    key = zeros(3 + 2 * len(loads))
    shape = sizes(len(loads), len(swaps) // 3)
    value = write_key(1, 2, 3, shape, buffer(twins), buffer(swaps or [0]), buffer(loads), buffer(mems), key)
    return int(value), [int(x) for x in key]


@settings(deadline=None)
@given(st.permutations([(3, 1), (3, 2), (7, 1), (0, 0)]))
def test_twin_ranks_share_a_key(order: list[tuple[int, int]]) -> None:
    loads, mems = [a for a, _ in order], [b for _, b in order]
    assert key_of(loads, mems, [0] * 4, []) == key_of([0, 3, 3, 7], [0, 1, 2, 1], [0] * 4, [])
    assert key_of(loads, mems, [0, 1, 2, 3], [])[1][3::2] == loads  # without symmetry nothing moves


def test_exchangeable_blocks_share_a_key() -> None:
    assert key_of([5, 6, 1, 2], [0] * 4, [0, 1, 2, 3], [0, 2, 2]) == key_of(
        [1, 2, 5, 6], [0] * 4, [0, 1, 2, 3], []
    )
    assert (
        key_of([5, 1, 6, 2], [0] * 4, [0, 1, 2, 3], [])[1]
        != key_of([1, 2, 5, 6], [0] * 4, [0, 1, 2, 3], [])[1]
    )


def test_equal_hashes_of_different_states_are_told_apart() -> None:
    slots, stored, stamps, shape = zeros(4 * 8), zeros(8 * 5), buffer([1, 0, 0, 0]), sizes(1)
    states = [buffer([1, 2, 3, load, 0]) for load in range(5)]
    assert all(is_new(11, shape, state, slots, stored, stamps) for state in states)
    assert not any(is_new(11, shape, state, slots, stored, stamps) for state in states)
    stamps[0], stamps[1] = 2, 0  # the next decision knows nothing
    assert is_new(11, shape, states[0], slots, stored, stamps)


def test_a_full_memo_forgets_nothing_and_learns_nothing() -> None:
    slots, stored, stamps, shape = zeros(4 * 2), zeros(2 * 5), buffer([1, 0, 0, 0]), sizes(1, memo=2)
    states = [buffer([1, 2, 3, load, 0]) for load in range(3)]
    assert all(is_new(load, shape, states[load], slots, stored, stamps) for load in range(3))
    assert [is_new(load, shape, states[load], slots, stored, stamps) for load in range(3)] == [
        False,
        False,
        True,
    ]


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 9), ledgers)
def test_packing_a_group_at_once_is_eq_8_one_by_one(
    count: int, price: int, mib: int, rows: list[tuple[int, int]]
) -> None:
    world, cap = len(rows), 40
    loads, mems = [a for a, _ in rows], [b for _, b in rows]
    target = max(1, (sum(loads) + count * price) // world)
    packed, held, row = buffer(loads), buffer(mems), zeros(world)
    prices = buffer([price] * world)
    done = pack_group(count, prices, 0, 1, mib, target, cap, world, packed, held, row)
    try:
        ranks = pack_fillers([FillerGroup(tuple(range(count)), price, mib)], loads, mems, target * world, cap)
    except FillerOverflowError:
        assert not done
        return
    assert done
    assert [int(x) for x in row] == [list(ranks.values()).count(r) for r in range(world)]
    assert ([int(x) for x in packed], [int(x) for x in held]) == (loads, mems)


@settings(deadline=None)
@given(
    ledgers,
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 30), st.integers(0, 8)), min_size=1, max_size=3),
)
def test_every_style_places_everything_under_the_cap(
    rows: list[tuple[int, int]], groups: list[tuple[int, int, int]]
) -> None:
    world, cap, number = len(rows), 40, len(groups)
    for style in (EQ_8, DENSE, MEMORY_ONLY):
        loads, mems = buffer(a for a, _ in rows), buffer(b for _, b in rows)
        took, order = zeros(number * world), buffer(range(number))
        counts, mib = (buffer(column) for column in list(zip(*groups, strict=True))[::2])
        price = buffer(p * (1 + r) for _, p, _ in groups for r in range(world))  # rank r is r times slower
        largest = pack_sand(
            style,
            order,
            counts,
            price,
            mib,
            60,
            cap,
            number,
            world,
            loads,
            mems,
            took,
            zeros(world),
            zeros(5),
        )
        if largest < 0:
            continue
        assert largest == max(loads)
        assert max(mems) <= cap
        for g, (count, _, _) in enumerate(groups):
            assert sum(took[g * world : (g + 1) * world]) == count
        for r, (load, held) in enumerate(rows):
            assert loads[r] == load + sum(took[g * world + r] * price[g * world + r] for g in range(number))
            assert mems[r] == held + sum(took[g * world + r] * groups[g][2] for g in range(number))


def test_relief_exchanges_heavy_for_light_where_memory_is_short() -> None:
    """Rank 1 is full of light sequences: it can take the heavy one only against three of them."""
    loads, mems, took = buffer([100, 60]), buffer([10, 10]), buffer([1, 0, 0, 6])
    price, mib = buffer([40, 40, 10, 10]), buffer([6, 2])
    assert relieve(90, 11, 2, 2, price, mib, loads, mems, took, zeros(5)) == 90
    assert [int(x) for x in took] == [0, 1, 3, 3]
    assert ([int(x) for x in loads], [int(x) for x in mems]) == ([90, 70], [10, 10])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(1, 10))
def test_what_fits_one_rank_fits_under_every_dual(times: list[int], k: int) -> None:
    for limit in (sum(times), sum(times) + 1, 2 * sum(times)):
        assert sum(dual(k, time, limit) for time in times) <= k * limit


def test_duals_refuse_what_does_not_divide_evenly() -> None:
    """Ten equal sequences on nine ranks: one rank takes two of them, though the area would leave room."""
    price = 7
    for limit in range(8, 2 * price):
        assert 10 * dual(1, price, limit) > 9 * limit
    assert 10 * dual(1, price, 2 * price) <= 9 * 2 * price
