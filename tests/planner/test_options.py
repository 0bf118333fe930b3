"""Legal configurations and families of rank sets (paper, Sec. IV-A)."""

from __future__ import annotations

import pytest

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.options import check_family, legal_configs, legal_family, legal_rank_sets

SIX, EIGHT = Topology.uniform(6), Topology.uniform(8)


def test_configs_are_all_factorisations_with_dividing_heads() -> None:
    found = legal_configs(12, 8)
    assert len(found) == len(set(found))
    expected = {
        ParallelConfig(q, h, k)
        for q in range(1, 9)
        for h in (1, 2, 3, 4, 6)
        for k in range(1, 9)
        if q * h * k <= 8
    }
    assert set(found) == expected
    assert [c.degree for c in found] == sorted(c.degree for c in found)
    assert max(c.degree for c in legal_configs(12, 8, max_degree=3)) == 3
    assert legal_configs(12, 1) == (ParallelConfig(),)


def test_aligned_sets_start_at_multiples_of_any_degree() -> None:
    assert legal_rank_sets(SIX, 3, "aligned") == ((0, 1, 2), (3, 4, 5))
    assert legal_rank_sets(SIX, 4, "aligned") == ((0, 1, 2, 3),)  # the degree need not divide N
    assert legal_rank_sets(Topology.uniform(5), 2, "aligned") == ((0, 1), (2, 3))


def test_contiguous_and_all_sets() -> None:
    assert len(legal_rank_sets(SIX, 4, "contiguous")) == 3
    assert len(legal_rank_sets(SIX, 4, "all")) == 15
    assert legal_rank_sets(SIX, 6, "all") == (tuple(range(6)),)


def test_node_sets_never_cross_nodes() -> None:
    two_nodes = Topology.uniform(12, 6)
    sets = legal_rank_sets(two_nodes, 4, "node")
    assert sets == ((0, 1, 2, 3), (6, 7, 8, 9))
    assert {two_nodes.class_of(s) for s in sets} == {"node"}
    assert {two_nodes.class_of(s) for s in legal_rank_sets(two_nodes, 4, "aligned")} == {"node", "2+2"}
    assert legal_rank_sets(two_nodes, 8, "node") == ()


def test_ranks_of_a_node_need_not_be_neighbours() -> None:
    assert legal_rank_sets(Topology((0, 1, 0, 1)), 2, "node") == ((0, 2), (1, 3))


@pytest.mark.parametrize("family", ["aligned", "contiguous", "node", "all"])
def test_single_ranks_are_always_legal(family: str) -> None:
    assert legal_rank_sets(SIX, 1, family) == tuple((r,) for r in range(6))


def test_the_family_is_sorted_for_group_creation_and_has_no_single_ranks() -> None:
    family = legal_family(SIX, "aligned", [1, 2, 3, 6, 9])
    assert family == ((0, 1, 2, 3, 4, 5), (0, 1, 2), (3, 4, 5), (0, 1), (2, 3), (4, 5))


@pytest.mark.parametrize("family", ["aligned", "contiguous", "node", "all"])
def test_the_bound_counts_groups_per_rank(family: str) -> None:
    degrees = range(1, 9)
    sets = legal_family(EIGHT, family, degrees)
    most = max(sum(rank in s for s in sets) for rank in range(8))
    check_family(EIGHT, family, degrees, most)
    with pytest.raises(ConfigError, match=family):
        check_family(EIGHT, family, degrees, most - 1)


def test_all_subsets_of_a_large_world_are_refused_without_listing_them() -> None:
    with pytest.raises(ConfigError, match="'all' on 1024 ranks"):
        check_family(Topology.uniform(1024, 8), "all", range(1, 9))


def test_unknown_families_are_refused() -> None:
    with pytest.raises(ConfigError, match="diagonal"):
        legal_rank_sets(SIX, 2, "diagonal")
