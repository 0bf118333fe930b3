"""Counted bytes against the running engine, Table II, and the closed forms of the rivals' own
implementations."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.engine.mixes import attend, make_engine, random_mix
from tests.engine.threads import run_threads
from zellige_lightning.placement import (
    AttentionGeometry,
    ParallelConfig,
    PlacementOption,
    Topology,
    build_schedule,
    whole,
)
from zellige_lightning.simulator.traffic import (
    BACKWARD,
    CHECKPOINTED,
    FORWARD,
    STORED,
    attention_bytes,
    block_traffic,
    closed_form_bytes,
    split_runs,
)

GEOMETRY = AttentionGeometry(num_heads=12, head_dim=128)


@pytest.mark.parametrize("seed", range(6))
def test_equals_what_the_engine_sends(seed: int) -> None:
    """By rank and by kind, on random mixes with overlapping rank sets, idle ranks and empty shards."""
    mix = random_mix(random.Random(seed), 6, 7)

    def sent(rank: int) -> Counter[str]:
        engine = make_engine(mix.rank_sets)
        attend(engine, mix, rank)
        return Counter(engine.counters.bytes_sent)

    measured = run_threads(sent, 6)
    geometry = AttentionGeometry(mix.heads, mix.dim, element_bytes=8, accumulation_bytes=8)
    counted = attention_bytes(mix.options, mix.lengths, Topology.uniform(6), geometry, passes=STORED)
    assert list(counted.by_rank) == [sum(counter.values()) for counter in measured]
    assert +counted.by_kind == +sum(measured, Counter())
    assert sum(counted.by_link.values()) == counted.total


def test_runs_are_the_blocks_of_the_schedule() -> None:
    for seed in range(40):
        mix = random_mix(random.Random(seed), 5, 12)
        blocks = {}
        for rank in range(5):
            for block in build_schedule(mix.options, mix.lengths, rank, 5).blocks:
                if not block.config.is_whole:
                    first = min(s.sequence for s in block.segments)
                    blocks[first] = block.config, block.ranks, tuple(s.num_tokens for s in block.segments)
        runs = split_runs(mix.options, mix.lengths)
        assert sum(run.count for run in runs) == len(blocks)
        assert all(blocks[run.first] == (run.config, run.ranks, run.lengths) for run in runs)
        orders = [(-run.config.degree, run.first) for run in runs]
        assert orders == sorted(orders)


def test_equal_neighbours_are_one_run() -> None:
    option = PlacementOption(ParallelConfig(1, 1, 2), (0, 1))
    (run,) = split_runs([option] * 5, [96] * 5)
    assert run.count == 5
    topology = Topology.uniform(2)
    one, five = (attention_bytes([option] * n, [96] * n, topology, GEOMETRY).total for n in (1, 5))
    assert five == 5 * one


@pytest.mark.parametrize(
    ("config", "exchanges", "share"),
    [
        (ParallelConfig(4, 1, 1), {"all_gather": 1}, 3.0),  # gather K/V once
        (ParallelConfig(1, 4, 1), {"ulysses": 2}, 3 / 4),  # of q, k, v, and of out: kv / h each way
        (ParallelConfig(1, 1, 4), {"ring": 3}, 3.0),  # stream K/V k - 1 times
    ],
)
def test_table_2(config: ParallelConfig, exchanges: dict[str, int], share: float) -> None:
    """Number of exchanges in forward, and bytes sent per rank over those of its K/V shard (paper, Table
    II)."""
    length = 4 * 360
    traffic = block_traffic(config, (length,), GEOMETRY)
    found = traffic.exchanges(FORWARD)
    assert Counter(exchange.kind for exchange in found) == exchanges
    sent = sum(size for exchange in found for size in exchange.sent[0].values())
    kv = length // 4 * 2 * 12 * 128 * 2
    log_sum_exp = length // 4 * 3 * 3 * 4 if config.h > 1 else 0  # three peers, 12 / 4 heads, 4 bytes
    assert (sent - log_sum_exp) / kv == pytest.approx(share * (2 if config.h > 1 else 1))


@pytest.mark.parametrize(("u", "r"), [(4, 1), (1, 4), (2, 3), (4, 2), (6, 2)])
def test_forward_equals_the_closed_form_of_the_rivals(u: int, r: int) -> None:
    """But for the log-sum-exp, which rides back with the output. Lengths that divide evenly."""
    config, length = ParallelConfig(1, u, r), u * r * 120
    option = PlacementOption(config, tuple(range(u * r)))
    ours = attention_bytes([option], [length], Topology.uniform(u * r), GEOMETRY, passes=[(FORWARD, 1)]).total
    log_sum_exp = length * 12 * 4 * (u - 1) // u
    elements = 4 * length * 1536 * (u - 1) / u + 2 * length * 1536 * (r - 1)
    assert ours - log_sum_exp == elements * 2
    stored = closed_form_bytes(config, length, GEOMETRY, checkpointed=False)
    assert stored == 2 * (2 * 4 * length * 1536 * (u - 1) / u + 3 * 2 * length * 1536 * (r - 1))


def test_backward_moves_more_than_the_closed_form() -> None:
    """The engine keeps local tensors and exchanges them again, where the rivals keep exchanged ones: eight
    tensors instead of four in a Ulysses backward, and dk, dv travel in fp32."""
    option = PlacementOption(ParallelConfig(1, 4, 1), (0, 1, 2, 3))
    topology, length = Topology.uniform(4), 4800
    backward = attention_bytes([option], [length], topology, GEOMETRY, passes=[(BACKWARD, 1)]).total
    tensors = backward / (length * 1536 * 2 * 3 / 4)
    assert 8.0 < tensors < 8.1  # and the log-sum-exp with its padding
    assert attention_bytes(
        [option], [length], topology, GEOMETRY, passes=CHECKPOINTED
    ).total == backward + 2 * (
        attention_bytes([option], [length], topology, GEOMETRY, passes=[(FORWARD, 1)]).total
    )


def test_whole_sequences_send_nothing() -> None:
    assert attention_bytes([whole(0), whole(1)], [100, 1], Topology.uniform(2), GEOMETRY).total == 0


def test_links_are_told_apart() -> None:
    """Two nodes of two: the Ulysses peers are neighbours in a node, the ring goes across."""
    option = PlacementOption(ParallelConfig(1, 2, 2), (0, 1, 2, 3))
    counted = attention_bytes([option], [480], Topology.uniform(4, 2), GEOMETRY)
    assert counted.by_link["node"] == counted.by_kind["ulysses"]
    assert counted.by_link["1+1"] == counted.by_kind["ring"] + counted.by_kind["ring_gradient"]
