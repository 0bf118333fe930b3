"""CP-SAT-ECF against exhaustive search and against the per-sequence formulation (paper, Eqs. (5)-(7))."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from tests.planner.toys import brute_force, choice, problem
from zellige_lightning.placement.plan import rank_sums
from zellige_lightning.planner.anchors import SolverLimits, place_anchors
from zellige_lightning.planner.problem import Cell, PlacementProblem, decode, drop_dominated, ungrouped

LIMITS = SolverLimits()


def outcome(toy: PlacementProblem, epsilon: float) -> tuple[int, int] | None:
    """What the two rounds certify, recomputed from the decoded placement."""
    result = place_anchors(toy, epsilon, LIMITS)
    if result.statuses == ("INFEASIBLE",):
        return None
    assert result.is_certified
    options = [option for _, option in decode(toy, result.cells).values()]
    prices = [c.price_us for c, _ in decode(toy, result.cells).values()]
    loads = rank_sums(options, prices, toy.world_size)
    memory = rank_sums(options, [c.memory_mib for c, _ in decode(toy, result.cells).values()], toy.world_size)
    assert max(memory) <= toy.cap_mib
    assert max(loads) <= result.best_us + int(result.best_us * epsilon)
    return result.best_us, sum(not o.config.is_whole for o in options)


@st.composite
def toys(draw: st.DrawFn, world: int = 3, most: int = 4) -> PlacementProblem:
    """Up to `most` sequences in two groups; splits may be cheaper in total than whole, memory is tight."""
    groups = []
    for _ in range(draw(st.integers(1, 2))):
        whole = draw(st.integers(1, 60))
        memory = draw(st.integers(1, 12))
        choices = [choice(1, whole, memory, world)]
        for degree in (2, 3):
            if draw(st.booleans()):
                price = draw(st.integers(max(1, whole // degree - 3), whole))
                sets = [(0, 1), (1, 2)] if degree == 2 and draw(st.booleans()) else None
                choices.append(choice(degree, price, draw(st.integers(1, memory)), world, sets))
        groups.append((draw(st.integers(1, most // 2)), choices))
    return problem(world, draw(st.integers(5, 40)), *groups)


@settings(max_examples=60, deadline=None)
@given(toys(), st.sampled_from([0.0, 1e-3, 0.2]))
def test_ecf_optimum_is_that_of_exhaustive_search(toy: PlacementProblem, epsilon: float) -> None:
    assert outcome(toy, epsilon) == brute_force(toy, epsilon)


@settings(max_examples=25, deadline=None)
@given(toys(most=6))
def test_ecf_equals_the_per_sequence_formulation(toy: PlacementProblem) -> None:
    assert outcome(toy, 1e-3) == outcome(ungrouped(toy), 1e-3)


@settings(max_examples=40, deadline=None)
@given(toys(most=8), st.randoms(use_true_random=False))
def test_aggregated_placements_decode_to_the_same_sums(toy: PlacementProblem, random) -> None:
    """ECF exactness: counts of any placement decode to the same loads, memory and number of splits."""
    picks, cells = [], Counter()
    for g, group in enumerate(toy.groups):
        for _ in group.members:
            j = random.randrange(len(group.choices))
            ranks = random.choice(group.choices[j].rank_sets)
            picks.append((group.choices[j], ranks))
            cells[g, j, ranks] += 1
    placed = decode(toy, [Cell(*key, count) for key, count in cells.items()]).values()
    assert len(placed) == toy.num_sequences
    for amount in ("price_us", "memory_mib"):
        expected = [
            sum(getattr(c, amount) for c, ranks in picks if r in ranks) for r in range(toy.world_size)
        ]
        found = rank_sums([o for _, o in placed], [getattr(c, amount) for c, _ in placed], toy.world_size)
        assert list(found) == expected
    assert sum(len(ranks) > 1 for _, ranks in picks) == sum(not o.config.is_whole for _, o in placed)


def test_dominated_choices_go_and_the_optimum_stays() -> None:
    good, worse = choice(2, 30, 5, 4), choice(2, 31, 5, 4)
    other_sets = choice(2, 31, 5, 4, [(1, 2)])
    lean = choice(2, 40, 3, 4)
    assert set(drop_dominated([worse, good, other_sets, lean])) == {good, other_sets, lean}


def test_an_empty_anchor_set_is_trivially_optimal() -> None:
    result = place_anchors(PlacementProblem(4, 10, ()), 1e-3, LIMITS)
    assert (result.best_us, result.cells, result.is_certified) == (0, (), True)


def test_an_exhausted_limit_is_reported_not_hidden() -> None:
    sizes = [choice(1, 1000 + 37 * i, 1, 8) for i in range(20)]
    toy = problem(8, 100, *[(1, [c, choice(2, c.price_us // 2 + 7, 1, 8)]) for c in sizes])
    result = place_anchors(toy, 1e-3, SolverLimits(deterministic_limit=1e-6))
    assert not result.is_certified


@pytest.mark.parametrize("count", [1, 7, 500])
def test_the_number_of_variables_does_not_depend_on_multiplicities(count: int) -> None:
    from zellige_lightning.planner.anchors import _EcfModel

    toy = problem(4, 10**6, (count, [choice(1, 10, 1, 4), choice(2, 6, 1, 4)]))
    assert len(_EcfModel(toy).counts) == 4 + 2
