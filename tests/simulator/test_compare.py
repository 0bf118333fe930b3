"""Suites and comparisons."""

from __future__ import annotations

import pytest

from zellige_lightning.errors import DataError, ProfileError
from zellige_lightning.placement import Topology
from zellige_lightning.simulator.cluster import load_cluster
from zellige_lightning.simulator.compare import ALL_POLICIES, MAIN_POLICIES, Stage, ratio, spread
from zellige_lightning.simulator.constants import SHARES, SUITES, WAN_1_3B, image, video
from zellige_lightning.simulator.inputs import fitting_topology, load_catalog, parse_histogram, scaled
from zellige_lightning.simulator.prices import modeled_table
from zellige_lightning.simulator.workloads import batch_of, fig2_counts, suite_batch, suite_buckets


@pytest.fixture(scope="module")
def stage() -> Stage:
    """Four A800, the shapes of Fig. 2."""
    cluster = load_cluster("a800")
    topology = cluster.topology(4)
    table = modeled_table(cluster, WAN_1_3B, topology, list(fig2_counts()))
    return Stage(cluster, WAN_1_3B, topology, table, cluster.cap_mib(WAN_1_3B))


def test_figure_2_is_the_papers_batch() -> None:
    batch = batch_of(fig2_counts())
    assert batch.num_tokens == 1_263_600
    video_tokens = sum(s.num_tokens for s in batch.sequences if s.bucket.is_video)
    assert video_tokens / batch.num_tokens == pytest.approx(0.3504, abs=1e-4)


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda s: s.name)
@pytest.mark.parametrize("share", SHARES)
def test_suites_meet_their_budget_and_share(suite: object, share: int) -> None:
    from zellige_lightning.simulator.constants import Suite

    assert isinstance(suite, Suite)
    batch = suite_batch(suite, share)
    videos = sum(s.num_tokens for s in batch.sequences if s.bucket.is_video)
    coarse = 0.5 * (video("1080p", suite.seconds).num_tokens + video("720p", suite.seconds).num_tokens)
    assert abs(batch.num_tokens - suite.ranks * suite.tokens_per_rank) < coarse + 100_000
    assert abs(videos - share / 100 * suite.ranks * suite.tokens_per_rank) < coarse + 100_000
    assert {s.bucket for s in batch.sequences} <= set(suite_buckets(suite.seconds))


def test_rows_have_plans_times_and_bytes(stage: Stage) -> None:
    batch = batch_of(fig2_counts())
    rows = {row.policy: row for row in stage.rows(batch, ALL_POLICIES)}
    ours = rows["exact"]
    assert all(
        row.plan is not None and row.times is not None and row.sent is not None for row in rows.values()
    )
    for name, row in rows.items():
        found = ratio(row, ours)
        assert found is not None and found >= 0.999, name
        assert abs(row.additive_error or 0.0) < 0.05, name
    assert rows["naive"].sent is not None and rows["naive"].sent.total == 0
    assert (
        rows["usp"].sent is not None
        and ours.sent is not None
        and rows["usp"].sent.total > 2 * ours.sent.total
    )
    assert rows["naive"].times is not None and rows["naive"].times.imbalance > 1.2


def test_out_of_memory_is_shown_and_planned_without_a_cap(stage: Stage) -> None:
    tight = Stage(stage.cluster, stage.model, stage.topology, stage.table, 15_000)
    row = tight.row("naive", batch_of(fig2_counts()))
    assert row.plan is None and row.out_of_memory
    assert "out of memory" in row.error
    assert row.largest_memory_mib is not None and row.largest_memory_mib > 15_000
    assert tight.row("naive", batch_of(fig2_counts()), lift_cap=False).any_plan is None


def test_main_policies_are_policies() -> None:
    assert set(MAIN_POLICIES) <= set(ALL_POLICIES)
    assert spread([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)


# ---- inputs
# --------------------------------------------------------------------------------------------------


def test_scaling_keeps_proportions_and_the_budget() -> None:
    counts = {video("720p", 10): 3, image("720p"): 228}
    found = scaled(counts, 4 * 1_263_600)
    assert found == {video("720p", 10): 12, image("720p"): 912}
    small = scaled(counts, 400_000)
    tokens = sum(b.num_tokens * n for b, n in small.items())
    assert 390_000 <= tokens <= 400_000
    with pytest.raises(DataError, match="holds no sequence"):
        scaled(counts, 100)


def test_histograms_take_names_and_grids() -> None:
    catalog = load_catalog()
    found = parse_histogram("video_720p_10s=2, 1x45x80=3,2x3x4=1", catalog)
    assert {b.name: n for b, n in found.items()} == {"video_720p_10s": 2, "image_720p": 3, "adhoc-2x3x4": 1}


def test_a_profile_of_other_nodes_or_ranks_is_refused(stage: Stage) -> None:
    assert fitting_topology(stage.table, None, None) == Topology.uniform(4)
    with pytest.raises(ProfileError, match="measured on 4 ranks, not on 8"):
        fitting_topology(stage.table, 8, None)
    with pytest.raises(ProfileError, match="other nodes"):
        fitting_topology(stage.table, 4, Topology.uniform(4, 2))
