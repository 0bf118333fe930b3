"""What the base primitives send, counted, against the payloads of the paper's Table II."""

from __future__ import annotations

import pytest
import torch

from tests.engine.mixes import Mix, make_engine
from tests.engine.threads import run_threads
from zellige_lightning.engine import Counters
from zellige_lightning.placement import ParallelConfig, PlacementOption, whole

LENGTH, HEADS, DIM = 120, 12, 8  # divisible by every degree below


def forward_and_backward(
    options: list[PlacementOption], dtype: torch.dtype = torch.float32
) -> list[tuple[Counters, Counters]]:
    """Counters of the forward and of the backward of one call, on every rank."""
    world = max(option.ranks[-1] for option in options) + 1
    mix = Mix(world, (LENGTH,) * len(options), tuple(options), HEADS, DIM, dtype)

    def work(rank: int) -> tuple[Counters, Counters]:
        engine = make_engine(mix.rank_sets)
        engine.install(mix.schedule(rank))
        q, k, v, dout = mix.local(rank)
        out = engine(q.requires_grad_(), k, v)
        forward, engine.counters.bytes_sent = engine.counters.bytes_sent, type(engine.counters.bytes_sent)()
        exchanges, engine.counters.exchanges = engine.counters.exchanges, type(engine.counters.exchanges)()
        out.backward(dout)
        return Counters(forward, exchanges), Counters(engine.counters.bytes_sent, engine.counters.exchanges)

    return run_threads(work, world)


def split(q: int = 1, h: int = 1, k: int = 1) -> PlacementOption:
    return PlacementOption(ParallelConfig(q, h, k), tuple(range(q * h * k)))


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_all_gather_gathers_keys_and_values_once(degree: int) -> None:
    key_value = 2 * HEADS * DIM * 4  # bytes per token: kv of Table II
    for forward, _ in forward_and_backward([split(q=degree)]):
        assert dict(forward.exchanges) == {"all_gather": 1}
        # L kv in total; the part that a rank has already is not sent
        assert forward.bytes_sent["all_gather"] == LENGTH * key_value * (degree - 1) // degree


@pytest.mark.parametrize("degree", [2, 3, 4, 6])
def test_ulysses_exchanges_heads_twice(degree: int) -> None:
    local, token = LENGTH // degree, HEADS * DIM * 4
    log_sum_exp = HEADS * 4  # rides along, so that backward needs no further attention
    for forward, _ in forward_and_backward([split(h=degree)]):
        assert dict(forward.exchanges) == {"ulysses": 2}
        packed = local * (3 * token + token + log_sum_exp)  # q, k, v before attention, the output after it
        assert forward.bytes_sent["ulysses"] == packed * (degree - 1) // degree


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
def test_ring_streams_keys_and_values(degree: int) -> None:
    key_value = 2 * HEADS * DIM * 4
    for forward, backward in forward_and_backward([split(k=degree)]):
        assert dict(forward.exchanges) == {"ring": degree - 1}
        assert forward.bytes_sent["ring"] == (degree - 1) * LENGTH * key_value // degree
        # gradients of K/V travel one hop behind and home
        assert dict(backward.exchanges) == {"ring": degree - 1, "ring_gradient": degree}
        assert backward.bytes_sent["ring_gradient"] == LENGTH * key_value


def test_gradients_of_keys_travel_in_single_precision() -> None:
    for forward, backward in forward_and_backward([split(q=2)], torch.bfloat16):
        assert forward.bytes_sent["all_gather"] == LENGTH * 2 * HEADS * DIM * 2 // 2
        assert backward.bytes_sent["reduce_scatter"] == LENGTH * 2 * HEADS * DIM * 4 // 2


def test_composed_configurations_combine_their_axes() -> None:
    for forward, backward in forward_and_backward([split(q=2, h=2, k=2)]):
        assert dict(forward.exchanges) == {"ulysses": 2, "all_gather": 1, "ring": 1}
        assert dict(backward.exchanges) == {
            "ulysses": 2,
            "all_gather": 1,
            "ring": 1,
            "ring_gradient": 2,
            "reduce_scatter": 1,
        }


def test_whole_sequences_send_nothing() -> None:
    for forward, backward in forward_and_backward([whole(0), whole(1), whole(1)]):
        assert not forward.exchanges and not backward.exchanges


def test_ulysses_sequences_of_one_rank_set_share_their_exchanges() -> None:
    for forward, backward in forward_and_backward([split(h=2), whole(0), split(h=2), split(h=2)]):
        assert dict(forward.exchanges) == {"ulysses": 2}
        assert dict(backward.exchanges) == {"ulysses": 2}
