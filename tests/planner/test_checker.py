"""The independent checker finds what is wrong with a placement, and its own exhaustive search is right by
hand."""

from __future__ import annotations

from typing import Any

import pytest

from zellige_lightning.planner.checker import area_bound, check, exhaust, is_legal

PROBLEM: dict[str, Any] = {
    "ranks": 4,
    "cap": 10,
    "sequences": [
        {
            "id": "big",
            "count": 1,
            "options": [
                {"config": [1, 1, 1], "time": 100, "memory": 9, "rank_sets": "all"},
                {"config": [1, 2, 1], "time": 52, "memory": 5, "rank_sets": "aligned"},
            ],
        },
        {
            "id": "small",
            "count": 3,
            "options": [{"config": [1, 1, 1], "time": 20, "memory": 3, "rank_sets": "all"}],
        },
    ],
}
GOOD = [
    {"id": "big", "config": [1, 2, 1], "ranks": [0, 1], "count": 1},
    {"id": "small", "config": [1, 1, 1], "ranks": [2], "count": 2},
    {"id": "small", "config": [1, 1, 1], "ranks": [3], "count": 1},
]


def test_a_good_placement_by_hand() -> None:
    verdict = check(PROBLEM, GOOD, {"makespan": 52, "bound": 41, "splits": 1})
    assert (verdict.makespan, verdict.largest_memory, verdict.num_splits, verdict.faults) == (52, 6, 1, ())
    assert verdict.area_bound == 52  # the least time that `big` can take on one rank; the area is 160 / 4


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ([{"id": "big", "config": [1, 2, 1], "ranks": [1, 2], "count": 1}, *GOOD[1:]], "not an option"),
        ([{"id": "big", "config": [1, 2, 1], "ranks": [1, 0], "count": 1}, *GOOD[1:]], "not an option"),
        ([{"id": "big", "config": [1, 1, 2], "ranks": [0, 1], "count": 1}, *GOOD[1:]], "not an option"),
        ([{"id": "huge", "config": [1, 1, 1], "ranks": [0], "count": 1}, *GOOD], "not an option"),
        ([{"id": "small", "config": [1, 1, 1], "ranks": [4], "count": 3}, GOOD[0]], "not an option"),
        (GOOD[:2], "2 of 3 placed"),
        ([*GOOD, GOOD[0]], "big: 2 of 1 placed"),
        ([GOOD[0], {"id": "small", "config": [1, 1, 1], "ranks": [0], "count": 3}], "memory 14 above"),
    ],
)
def test_faults_are_found(change: list[dict[str, Any]], fault: str) -> None:
    assert any(fault in text for text in check(PROBLEM, change).faults)


@pytest.mark.parametrize(
    ("claims", "fault"),
    [({"makespan": 51}, "makespan of 51"), ({"bound": 53}, "bound of 53"), ({"splits": 0}, "0 spl")],
)
def test_false_claims_are_found(claims: dict[str, int], fault: str) -> None:
    assert any(fault in text for text in check(PROBLEM, GOOD, claims).faults)


def test_exhaustive_search_by_hand() -> None:
    assert exhaust(PROBLEM) == (52, 1)
    assert exhaust(PROBLEM, epsilon=1.0) == (52, 0)  # 100 is within a factor of two
    assert exhaust({**PROBLEM, "cap": 2}) is None


def test_a_start_counts_once_for_each_configuration_and_rank_set() -> None:
    """Two halves of 20 on (0, 1) and one on (2, 3), each 10 with a start of 7."""
    options = [
        {"config": [1, 2, 1], "time": 10, "memory": 1, "rank_sets": "aligned", "start": 7},
        {"config": [1, 1, 1], "time": 20, "memory": 1, "rank_sets": "all"},
    ]
    problem = {"ranks": 4, "cap": 9, "sequences": [{"id": "a", "count": 3, "options": options}]}
    placed = [
        {"id": "a", "config": [1, 2, 1], "ranks": [0, 1], "count": 2},
        {"id": "a", "config": [1, 2, 1], "ranks": [2, 3], "count": 1},
    ]
    assert check(problem, placed).makespan == 27
    assert exhaust(problem) == (20, 0)
    two = {**problem, "ranks": 2}
    assert exhaust(two) == (37, 1)  # 20 and 20 whole, and half of the third with its start; split: 37 too


def test_families_and_area() -> None:
    assert is_legal((2, 3), "aligned", 4)
    assert not is_legal((1, 2), "aligned", 4)
    assert is_legal((1, 2), "contig", 4)
    assert not is_legal((0, 2), "contig", 4)
    assert is_legal((0, 2), "all", 4)
    assert is_legal((0, 2), [[0, 2]], 4)
    assert area_bound({**PROBLEM, "sequences": PROBLEM["sequences"][1:]}) == 20
