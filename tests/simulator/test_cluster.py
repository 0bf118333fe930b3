"""Cluster files: complete, sourced, and refused where damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from zellige_lightning.errors import ConfigError
from zellige_lightning.simulator.cluster import CONSTANTS, cluster_names, load_cluster, parse_cluster
from zellige_lightning.simulator.constants import WAN_1_3B, WAN_14B, video


@pytest.mark.parametrize("name", cluster_names())
def test_every_constant_has_a_source(name: str) -> None:
    cluster = load_cluster(name)
    assert set(cluster.sources) == set(CONSTANTS)
    assert all(len(source) > 5 for source in cluster.sources.values())
    assert cluster.cap_mib(WAN_1_3B) > 20_000


def test_the_clusters_that_the_paper_and_its_readers_have() -> None:
    assert {"a800", "a800_low", "a6000", "h100", "h200"} <= set(cluster_names())


def test_only_the_bandwidths_differ_in_the_low_set() -> None:
    usual, low = load_cluster("a800"), load_cluster("a800_low")
    differ = {name for name in CONSTANTS if getattr(usual, name) != getattr(low, name)}
    assert differ == {"node_gb_per_s", "cross_gb_per_s"}


def test_memory_caps_agree_with_what_the_paper_ran() -> None:
    """A whole 10-second 1080p video fits on an A800, a whole 15-second one does not, nor on an A6000 (Fig.
    7)."""
    from zellige_lightning.placement import ParallelConfig
    from zellige_lightning.planner import MemoryModel

    memory = MemoryModel(WAN_1_3B.geometry)
    ten, fifteen = (memory.memory_mib(video("1080p", s).num_tokens, ParallelConfig()) for s in (10, 15))
    assert ten < load_cluster("a800").cap_mib(WAN_1_3B) < fifteen
    assert load_cluster("a6000").cap_mib(WAN_1_3B) < ten


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="Wan2.1-14B.*a6000"):
        load_cluster("a6000").cap_mib(WAN_14B)


@pytest.mark.parametrize("world", [0, -1, 1025])
def test_worlds_outside_the_cluster(world: int) -> None:
    with pytest.raises(ConfigError, match="ranks on cluster a800"):
        load_cluster("a800").topology(world)


def text_with(**changes: str) -> str:
    rows = {name: f'[1, "source of {name}"]' for name in CONSTANTS} | changes
    return "\n".join(f"{name}: {row}" for name, row in rows.items() if row)


def test_own_clusters_from_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text_with(ranks_per_node='[4, "my rack"]', max_ranks='[64, "my rack"]'))
    cluster = load_cluster(path)
    assert (cluster.name, cluster.topology(8).num_nodes) == ("mine", 2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"peak_tflops": ""}, "missing or unknown constants .'peak_tflops'"),
        ({"peak_teraflops": '[1, "x"]'}, "unknown constants .'peak_teraflops'"),
        ({"hop_us": "3"}, "hop_us = 3"),
        ({"hop_us": "[3, 4]"}, "hop_us"),
        ({"node_gb_per_s": '[-1, "x"]'}, "node_gb_per_s = -1"),
        ({"node_gb_per_s": '[null, "x"]'}, "node_gb_per_s = None"),
        ({"peak_tflops": '[.inf, "x"]'}, "peak_tflops = inf"),
        ({"peak_tflops": '[0, "x"]'}, "peak_tflops = 0"),
        ({"peak_tflops": "[1, "}, "is no YAML"),
    ],
)
def test_damaged_files_say_what_is_wrong(changes: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_cluster("x", text_with(**changes))


def test_unknown_cluster() -> None:
    with pytest.raises(ConfigError, match="no cluster 'b200'.*\n.*a800"):
        load_cluster("b200")
