"""The figures of `benchmarks/step.py`, by hand."""

from __future__ import annotations

import pytest
from step_report import AGAIN, OURS, Entry, Measured, flat_figures

from zellige_lightning.placement import ParallelConfig

SPLIT, WHOLE = ParallelConfig(2, 1, 1), ParallelConfig(1, 1, 1)


def entry(*seconds: float, config: ParallelConfig = SPLIT, loss: float = 1.0) -> Entry:
    placement = ((("video", config),), (("video", config),))
    return Entry(seconds, seconds, 1.0, 1.1 * seconds[0], loss, 0.1, placement)


def measured(ours: Entry, again: Entry, rival: Entry) -> Measured:
    return Measured(2, 3, [()], {OURS: [ours], AGAIN: [again], "usp": [rival]}, [0.99])


def test_a_rival_is_compared_by_medians() -> None:
    figures = flat_figures(
        measured(entry(1.0, 1.0, 9.0), entry(1.0, 1.0, 1.0), entry(1.5, 1.5, 0.1, config=WHOLE))
    )
    assert figures["ratio_usp"] == figures["least_ratio_usp"] == 1.5
    assert figures["worst_over_best_rival"] == pytest.approx(1 / 1.5, rel=1e-3)
    assert figures["batches_slower_beyond_noise"] == 0
    assert figures["prediction_error_pct"] == pytest.approx(10.0)


@pytest.mark.parametrize(("spread", "slower"), [(0.01, 1), (0.2, 0)])
def test_slower_counts_beyond_what_the_same_plan_differs_by(spread: float, slower: int) -> None:
    """5 % more than the rival says nothing where the same plan, run again, is up to 20 % away."""
    steps = [1.0 - spread, 1.0, 1.0 + spread]
    figures = flat_figures(measured(entry(*steps), entry(*steps), entry(0.95, 0.95, 0.95, config=WHOLE)))
    assert figures["worst_over_best_rival"] == pytest.approx(1 / 0.95, rel=1e-3)
    assert figures["noise_pct"] > (5.3 if not slower else 0.0)
    assert figures["batches_slower_beyond_noise"] == slower


def test_a_rival_that_places_alike_is_the_same_plan_again() -> None:
    alone = flat_figures(
        measured(entry(1.0, 1.0, 1.0), entry(1.0, 1.0, 1.0), entry(2.0, 2.0, 2.0, config=WHOLE))
    )
    assert alone["noise_pct"] == 0.0
    spread = measured(entry(1.0, 1.0, 1.0), entry(1.0, 1.0, 1.0), entry(1.1, 1.1, 1.1))
    spread.entries["naive"] = [entry(2.0, 2.0, 2.0, config=WHOLE, loss=1.5)]
    figures = flat_figures(spread)
    assert figures["noise_pct"] == pytest.approx(10.0)
    assert figures["max_loss_difference"] == pytest.approx(0.5)
    assert figures["worst_over_best_rival"] == 0.5
