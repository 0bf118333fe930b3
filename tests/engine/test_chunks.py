"""An all-gather in chunks of heads: other exchanges, the same bytes and the same bits."""

from __future__ import annotations

import pytest
import torch

from tests.engine.mixes import Mix, Result, attend, make_engine
from tests.engine.threads import run_threads
from zellige_lightning.engine import Counters, layout
from zellige_lightning.engine.layout import gather_chunks
from zellige_lightning.placement import ParallelConfig, PlacementOption, whole


def run(mix: Mix) -> list[tuple[Result, Counters]]:
    def work(rank: int) -> tuple[Result, Counters]:
        engine = make_engine(mix.rank_sets)
        return attend(engine, mix, rank), engine.counters

    return run_threads(work, mix.world_size)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("config", "chunks"), [((4, 1, 1), 4), ((2, 2, 1), 3), ((2, 4, 1), 3), ((2, 1, 2), 1), ((3, 1, 1), 4)]
)
def test_chunks_change_no_bit_and_no_byte(
    config: tuple[int, int, int], chunks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    degree = ParallelConfig(*config).degree
    option = PlacementOption(ParallelConfig(*config), tuple(range(degree)))
    # the second has ranks without tokens; whole sequences run while the first chunk is in flight
    mix = Mix(degree, (67, 1, 9), (option, option, whole(0)), dtype=dtype)
    together = run(mix)
    monkeypatch.setattr(layout, "SMALLEST_CHUNK_BYTES", 1)
    apart = run(mix)
    for (one, counted), (other, chunked) in zip(together, apart, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        assert chunked.bytes_sent == counted.bytes_sent
        assert chunked.exchanges["all_gather"] == chunks * counted.exchanges["all_gather"] > 0
        assert chunked.exchanges["reduce_scatter"] == chunks * counted.exchanges["reduce_scatter"] > 0
        assert chunked.exchanges["ulysses"] == counted.exchanges["ulysses"]


def test_the_number_of_chunks_divides_the_heads_and_pays() -> None:
    large = 100 * layout.SMALLEST_CHUNK_BYTES
    assert [gather_chunks(large, heads, 4) for heads in (1, 2, 3, 5, 6, 12, 40)] == [1, 2, 3, 1, 3, 4, 4]
    assert gather_chunks(large, 12, 1) == 1
    assert [gather_chunks(n * layout.SMALLEST_CHUNK_BYTES, 12, 4) for n in (0, 1, 2, 3, 5)] == [1, 1, 2, 3, 4]
