"""Nodes of ranks: found from what the ranks see, or set by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement.topology import RankSite, Topology, detect_topology, rank_site


def machines(*names: str, size: int = 0) -> list[RankSite]:
    return [RankSite(name, size) for name in names]


def test_ranks_of_one_machine_are_a_node() -> None:
    assert detect_topology(machines("b", "b", "a", "a")).node_of == (0, 0, 1, 1)
    assert detect_topology(machines("a", "b", "a", "b")).node_of == (0, 1, 0, 1)
    assert detect_topology(machines("a", "a", "a")) == Topology.uniform(3)


def test_one_machine_with_two_launchers_is_one_node() -> None:
    assert detect_topology(machines("a", "a", "a", "a", size=2)) == Topology.uniform(4)


def test_local_world_sizes_count_where_machines_have_no_name() -> None:
    sizes = [RankSite("", 2)] * 2 + [RankSite("", 3)] * 3 + [RankSite("", 2)] * 2
    assert detect_topology(sizes).node_of == (0, 0, 1, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("sizes", "nodes"),
    [
        ((0, 0, 0, 0), (0, 0, 0, 0)),
        ((2, 2, 3, 3), (0, 0, 0, 0)),
        ((2, 2, 0, 0), (0, 0, 0, 0)),
        ((2, 2, 2), (0, 0, 0)),
        ((3, 3, 3, 1), (0, 0, 0, 1)),
    ],
)
def test_sizes_that_do_not_add_up_are_one_node(sizes: tuple[int, ...], nodes: tuple[int, ...]) -> None:
    assert detect_topology([RankSite("", size) for size in sizes]).node_of == nodes


def test_the_setting_overrides_what_ranks_see() -> None:
    assert detect_topology(machines(*"aaaaa"), 2).node_of == (0, 0, 1, 1, 2)
    for bad in (0, -3):
        with pytest.raises(ConfigError, match=f"nodes of {bad} ranks"):
            detect_topology(machines("a", "b"), bad)
    with pytest.raises(ConfigError, match="0 ranks"):
        detect_topology([])


def test_a_process_says_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("1234-ab\n")
    monkeypatch.setattr("socket.gethostname", lambda: "host|1")
    assert rank_site({"LOCAL_WORLD_SIZE": "8"}, boot) == RankSite("1234-ab", 8)
    assert rank_site({"LOCAL_WORLD_SIZE": "many"}, tmp_path / "none") == RankSite("host|1", 0)
    assert rank_site({}, None) == RankSite("host|1", 0)
    for site in (RankSite("1234-ab", 8), RankSite("host|1", 0), RankSite()):
        assert RankSite.from_text(site.to_text()) == site
    with pytest.raises(ConfigError, match="where a rank runs"):
        RankSite.from_text("eight")
