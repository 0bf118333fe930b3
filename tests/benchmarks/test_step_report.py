"""The statistics of `benchmarks/step.py`, by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import ranks
from step_ranks import turn_order
from step_report import AGAIN, OURS, Entry, Measured, flat_figures

from zellige_lightning.placement import ParallelConfig
from zellige_lightning.placement.plan import WHOLE

RIVALS = [f"rival{i}" for i in range(10)]
ULYSSES = ParallelConfig(1, 2, 1)


def entry(steps: Sequence[float], place: str, config: ParallelConfig = ULYSSES, loss: float = 1.0) -> Entry:
    return Entry(tuple(steps), tuple(steps), 1.0, 1.1 * steps[0], loss, 0.0, (((place, config),),))


def measured(entries: dict[str, list[Entry | None]], num_batches: int) -> Measured:
    return Measured(2, 6, [()] * num_batches, entries, [1.0] * num_batches)


def noisy(rng: random.Random, scale: float = 1.0, count: int = 6) -> list[float]:
    return [scale * rng.uniform(0.9, 1.1) for _ in range(count)]


def drawn(seed: int, rival_scale: float, num_batches: int = 40) -> Measured:
    """Eleven placements, ours measured twice; the first rival's steps are `rival_scale` of the others'."""
    rng = random.Random(seed)
    entries: dict[str, list[Entry | None]] = {
        name: [entry(noisy(rng), "ours") for _ in range(num_batches)] for name in (OURS, AGAIN)
    }
    for rival in RIVALS:
        scale = rival_scale if rival == RIVALS[0] else 1.0
        entries[rival] = [entry(noisy(rng, scale), rival) for _ in range(num_batches)]
    return measured(entries, num_batches)


def test_the_fastest_of_many_equals_is_not_called_faster() -> None:
    """With ten rivals of our own speed, one of them nearly always has the smaller median."""
    figures = flat_figures(drawn(0, 1.0))
    assert figures["median_over_best_rival"] > 1.01
    assert figures["batches_slower_beyond_noise"] <= 5  # one in forty, and a pool of 12 steps


def test_a_faster_rival_is_seen() -> None:
    figures = flat_figures(drawn(0, 0.8))
    assert figures["ratio_rival0"] == pytest.approx(0.8, abs=0.03)
    assert figures["batches_slower_beyond_noise"] == 40 == figures["cpu_batches_slower_beyond_noise"]


def test_entries_that_place_alike_are_one_measurement() -> None:
    entries: dict[str, list[Entry | None]] = {
        OURS: [entry([1.0, 1.0, 1.0], "a")],
        AGAIN: [entry([3.0, 3.0, 3.0], "a")],
        "same": [entry([3.2, 3.2, 3.2], "a")],
        "whole": [entry([6.0, 6.0, 6.0], "a", WHOLE)],
        "none": [None],
    }
    figures = flat_figures(measured(entries, 1))
    assert figures["ratio_same"] == 1.0 and figures["ratio_whole"] == 2.0
    assert figures["worst_over_best_rival"] == 0.5
    assert "ratio_none" not in figures


def test_nothing_is_said_where_all_place_alike() -> None:
    figures = flat_figures(measured({OURS: [entry([1.0], "a")], AGAIN: [entry([1.0], "a")]}, 1))
    assert "worst_over_best_rival" not in figures and figures["batches"] == 1


def against(ours: Entry, again: Entry, rival: Entry) -> dict[str, float]:
    return flat_figures(measured({OURS: [ours], AGAIN: [again], "usp": [rival]}, 1))


def test_a_rival_is_compared_by_medians() -> None:
    ours, again = entry([1.0, 1.0, 9.0], "a"), entry([1.0, 1.0, 1.0], "a")
    figures = against(ours, again, entry([1.5, 1.5, 0.1], "b", loss=1.5))
    assert figures["ratio_usp"] == figures["least_ratio_usp"] == 1.5
    assert figures["worst_over_best_rival"] == pytest.approx(1 / 1.5, rel=1e-3)
    assert figures["batches_slower_beyond_noise"] == 0
    assert figures["prediction_error_pct"] == pytest.approx(10.0)
    assert figures["max_loss_difference"] == pytest.approx(0.5)


@pytest.mark.parametrize(("spread", "slower"), [(0.01, 1), (0.2, 0)])
def test_slower_counts_beyond_what_the_same_plan_differs_by(spread: float, slower: int) -> None:
    """5 % more than the rival says nothing where the same plan, run again, is up to 20 % away."""
    steps = [1.0 - spread, 1.0, 1.0 + spread]
    figures = against(entry(steps, "a"), entry(steps, "a"), entry([0.95] * 3, "b"))
    assert figures["worst_over_best_rival"] == pytest.approx(1 / 0.95, rel=1e-3)
    assert figures["noise_pct"] > (5.3 if not slower else 0.0)
    assert figures["batches_slower_beyond_noise"] == slower


def test_every_entry_gets_every_turn() -> None:
    """On each batch over the rounds of a full run; alike wherever it is asked."""
    for batch in range(10):
        orders = [turn_order(4, batch, repeat) for repeat in range(25)]
        assert orders == [turn_order(4, batch, repeat) for repeat in range(25)]
        assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
        for entry in range(4):
            assert {order.index(entry) for order in orders} == {0, 1, 2, 3}


def test_a_step_beside_other_work_has_lost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the loop that was slower before it or behind it, and by the time without a core."""
    loops, waits = iter([2, 2, 4, 2, 2, 3, 2, 2]), iter([0, 0, 0, 0, 0, 0, 0, 1])
    loop_clock = iter([time for loop in loops for time in (0.0, loop)])
    wall_clock = iter([0.0, 2.0] * 4)
    clocks = SimpleNamespace(thread_time=lambda: next(loop_clock), perf_counter=lambda: next(wall_clock))
    monkeypatch.setattr(ranks, "time", clocks)
    monkeypatch.setattr(ranks, "queued_s", lambda: next(waits))
    watch, shares = ranks.CoreWatch(), []
    for _ in range(4):
        watch.begin()
        shares.append(watch.lost_share())
    assert shares == [0.0, 1.0, 0.5, 0.5]
