"""Simulated steps: against prices, by hand, and where the sum of prices is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zellige_lightning.placement import ParallelConfig, PlacementOption, Topology, whole
from zellige_lightning.placement.filling import fill_gaps
from zellige_lightning.simulator.cluster import load_cluster
from zellige_lightning.simulator.constants import WAN_1_3B, image, video
from zellige_lightning.simulator.durations import StepModel
from zellige_lightning.simulator.prices import default_configs, modeled_table
from zellige_lightning.simulator.step import StepSimulator
from zellige_lightning.simulator.traffic import BACKWARD, FORWARD

A800 = load_cluster("a800")
VIDEO, IMAGE = video("720p", 10), image("720p")


def simulator(world: int, **changes: float) -> StepSimulator:
    cluster = replace(A800, **changes)
    return StepSimulator(cluster, WAN_1_3B, cluster.topology(world))


def test_a_whole_sequence_is_its_operations() -> None:
    """Two forwards and a backward of linear layers (4 forwards' worth) and of attention, by the constants."""
    times = simulator(1).placement([whole(0)], [VIDEO.num_tokens])
    n, d, peak = VIDEO.num_tokens, 1536, 312e12
    linear = 4 * n * (12 * d * d + 4 * d * 8960 + 4 * d * 512) / (peak * 0.60)
    efficiency = (n / (n + 250)) ** 2
    attention = 4 * n * n * d * (2 / 0.62 + 2.5 / 0.50) / (peak * efficiency)
    assert times.makespan == pytest.approx(30 * (linear + attention), rel=1e-9)
    assert times.exposed == times.waiting == (0.0,)


def test_operations_are_those_of_the_model() -> None:
    """Forward of the 10-second 1080p video: 21,500 TFLOP, embeddings and text aside."""
    n = 334_560
    flops = 30 * (n * WAN_1_3B.linear_flops_per_token + 4 * n * n * 1536)
    assert flops == pytest.approx(21_500e12, rel=1e-3)


def test_splitting_evenly_divides_the_work_and_adds_the_wire() -> None:
    one = simulator(4, split_launch_us=0.0).placement([whole(0)], [VIDEO.num_tokens]).makespan
    option = PlacementOption(ParallelConfig(1, 4, 1), (0, 1, 2, 3))
    split = simulator(4, split_launch_us=0.0).placement([option], [VIDEO.num_tokens])
    assert split.computing[0] == pytest.approx(one / 4, rel=1e-3)
    assert 0.0 < split.exposed[0] < 0.05 * split.makespan
    assert split.imbalance == pytest.approx(1.0, abs=1e-3)


def test_a_ring_hides_behind_its_attention() -> None:
    """All but the last dk, dv hop of a backward is behind kernels of a long video; a short image's ring is
    not."""
    sim, ring = simulator(4), PlacementOption(ParallelConfig(1, 1, 4), (0, 1, 2, 3))
    long, short = sim.placement([ring], [VIDEO.num_tokens]), sim.placement([ring], [IMAGE.num_tokens])
    assert long.exposed[0] / long.makespan < 0.02
    assert short.exposed[0] / short.makespan > 0.02


def test_the_pack_hides_the_first_exchange() -> None:
    """By just the time that the pack's own attention takes."""
    slow = simulator(2, node_gb_per_s=1.0)
    split = PlacementOption(ParallelConfig(1, 2, 1), (0, 1))
    images = [whole(0), whole(1)] * 40
    alone = slow.placement([split], [VIDEO.num_tokens])
    beside = slow.placement([split, *images], [VIDEO.num_tokens] + [IMAGE.num_tokens] * 80)
    kernels = (slow.step.attention_s(3600, 3600, 1.0, which) for which in (FORWARD, FORWARD, BACKWARD))
    assert alone.exposed[0] - beside.exposed[0] == pytest.approx(30 * 40 * sum(kernels), rel=1e-6)


def test_prices_add_up_where_ranks_are_alike() -> None:
    """Equal shards and equal packs on all ranks: the events are the sum of prices, but for what the pack
    hides."""
    topology = A800.topology(4)
    table = modeled_table(A800, WAN_1_3B, topology, [VIDEO, IMAGE])
    config = ParallelConfig(1, 4, 1)
    options = [PlacementOption(config, (0, 1, 2, 3))] * 2 + [whole(r % 4) for r in range(40)]
    lengths = [VIDEO.num_tokens] * 2 + [IMAGE.num_tokens] * 40
    price = 2 * (table.price_us(VIDEO, config, "node") or 0) + 10 * (
        table.price_us(IMAGE, ParallelConfig(), "node") or 0
    )
    assert simulator(4).placement(options, lengths).makespan == pytest.approx(price * 1e-6, rel=0.01)


def test_prices_do_not_add_up_where_a_chain_forms() -> None:
    """Rank 1 takes part in a wide split and then a narrow one; rank 3 has as much to do, but as a pack,
    which runs inside the wide split and holds the others up: per layer they wait for each other, though
    each rank's sum is equal."""
    wide, narrow = (
        PlacementOption(ParallelConfig(1, 4, 1), (0, 1, 2, 3)),
        PlacementOption(ParallelConfig(1, 2, 1), (0, 1)),
    )
    packs = [whole(2), whole(3)]
    lengths = [VIDEO.num_tokens, VIDEO.num_tokens, 104_000, 104_000]
    times = simulator(4, half_efficiency_tokens=0.0).placement([wide, narrow, *packs], lengths)
    busy = [c + e for c, e in zip(times.computing, times.exposed, strict=True)]
    assert max(busy) / min(busy) < 1.05
    assert times.makespan > 1.02 * max(busy)


def test_a_filling_dissolves_a_chain() -> None:
    """The same, with packs of images, which run where their rank would wait."""
    wide, narrow = (
        PlacementOption(ParallelConfig(1, 4, 1), (0, 1, 2, 3)),
        PlacementOption(ParallelConfig(1, 2, 1), (0, 1)),
    )
    images = 420
    options = [wide, narrow, *[whole(2 + i % 2) for i in range(images)]]
    lengths = [VIDEO.num_tokens, VIDEO.num_tokens, *[IMAGE.num_tokens] * images]
    sim = simulator(4)
    attention = [sim.step.attention_s(n, n, 1.0, FORWARD) for n in lengths]
    filling = fill_gaps(options, attention, [0.0] * len(options), 4)
    plain, filled = sim.placement(options, lengths), sim.placement(options, lengths, filling)
    assert max(filled.waiting) < 0.85 * max(plain.waiting)
    assert filled.computing == pytest.approx(plain.computing)


def test_extrapolated_layers_equal_simulated_ones() -> None:
    options = [PlacementOption(ParallelConfig(1, 2, 2), (0, 1, 2, 3))]
    options += [PlacementOption(ParallelConfig(1, 2, 1), (1, 2))]
    options += [whole(r) for r in (0, 3, 3, 0)]
    lengths = [VIDEO.num_tokens, 63_960] + [IMAGE.num_tokens * 4] * 4
    few, all_layers = (StepSimulator(A800, WAN_1_3B, A800.topology(4), layers=n) for n in (3, 30))
    expected = all_layers.placement(options, lengths).makespan
    assert few.placement(options, lengths).makespan == pytest.approx(expected, rel=5e-3)


def test_one_layer_prices_a_single_sequence() -> None:
    for config in (ParallelConfig(1, 4, 1), ParallelConfig(2, 1, 2), ParallelConfig(1, 1, 4)):
        option = PlacementOption(config, (0, 1, 2, 3))
        one, few = (StepSimulator(A800, WAN_1_3B, A800.topology(4), layers=n) for n in (1, 3))
        expected = few.placement([option], [63_961]).makespan
        assert one.placement([option], [63_961]).makespan == pytest.approx(expected, rel=1e-3)


def test_parts_of_a_rank_add_up_to_the_makespan() -> None:
    options = [PlacementOption(ParallelConfig(1, 1, 3), (0, 1, 3)), whole(2), whole(0)]
    times = simulator(4).placement(options, [VIDEO.num_tokens, IMAGE.num_tokens, IMAGE.num_tokens])
    for parts in zip(times.computing, times.exposed, times.waiting, strict=True):
        assert sum(parts) == pytest.approx(times.makespan, rel=1e-9)


def test_the_slowest_link_of_a_set_is_what_costs() -> None:
    topology = A800.topology(16)
    table = modeled_table(A800, WAN_1_3B, topology, [VIDEO], [ParallelConfig(), ParallelConfig(1, 4, 1)])
    near, far = (table.price_us(VIDEO, ParallelConfig(1, 4, 1), where) for where in ("node", "2+2"))
    assert near is not None and far is not None and far > near


def test_pairs_are_cheaper_than_neighbours_across_the_bridge() -> None:
    a6000 = load_cluster("a6000")
    topology = a6000.topology(8)
    assert (
        topology.class_of((2, 3)) == "pair"
        and topology.class_of((1, 2)) == topology.class_of((0, 2)) == "node"
    )
    config = ParallelConfig(1, 2, 1)
    table = modeled_table(a6000, WAN_1_3B, topology, [VIDEO], [ParallelConfig(), config])
    pair, node = (table.price_us(VIDEO, config, where) for where in ("pair", "node"))
    assert pair is not None and node is not None and pair < node


def test_short_shards_are_inefficient() -> None:
    model = StepModel(A800, WAN_1_3B, Topology.uniform(1))
    long, short = (model.attention_s(n, n, 1.0, FORWARD) / n**2 for n in (100_000, 250))
    assert short / long == pytest.approx(4.0, rel=0.02)
    assert model.attention_s(0, 100, 1.0, FORWARD) == 0.0
    assert model.attention_s(5000, 5000, 1.0, BACKWARD) == pytest.approx(
        2.5 * 0.62 / 0.50 * model.attention_s(5000, 5000, 1.0, FORWARD)
    )


def test_default_configurations_hold_all_factorizations_of_the_world() -> None:
    configs = default_configs(12, 16)
    assert {ParallelConfig(1, u, 16 // u) for u in (1, 2, 4)} <= set(configs)
    assert {ParallelConfig(1, g, 1) for g in (1, 2, 3, 4, 6, 12)} <= set(configs)
