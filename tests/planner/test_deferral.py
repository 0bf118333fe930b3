"""What cannot be planned even in waves waits for the next batch: named, once, the mean unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.toys import BUCKETS, MEMORY, batch, planner
from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import WHOLE
from zellige_lightning.planner.deferral import carry, withhold

COUNTS = {"v480": 4, "i720": 20, "i256": 30}


def cap(share: float, world: int = 4) -> int:
    """MiB per rank that hold `share` of the batch kept whole."""
    total = sum(n * MEMORY.memory_mib(BUCKETS[name].num_tokens, WHOLE) for name, n in COUNTS.items())
    return int(total * share / world)


def test_nothing_waits_where_waves_are_enough() -> None:
    made = planner(4, cap(0.4), name="exact", defer=True)
    planned = made.plan_ladder(batch(COUNTS))
    assert (planned.batch, planned.deferred, planned.report) == (batch(COUNTS), (), "")
    assert len(planned.waves) > 1


@pytest.mark.parametrize("max_waves", [1, 2])
def test_the_rest_is_planned_and_the_largest_wait(max_waves: int) -> None:
    made = planner(4, cap(0.8 / max_waves), name="exact", defer=True, max_waves=max_waves)
    planned = made.plan_ladder(batch(COUNTS))
    assert len(planned.waves) <= max_waves
    waiting, staying = [key for key, _ in planned.deferred], [s.key for s in planned.batch.sequences]
    assert 1 <= len(waiting) <= 4
    assert all(key.startswith("v480/") for key in waiting)
    assert sorted(waiting + staying) == sorted(s.key for s in batch(COUNTS).sequences)
    assert planned.batch.window_sequences == len(staying)
    assert planned.batch.window_tokens == planned.batch.num_tokens
    assert all(key in planned.report for key in waiting)
    assert planned.report.startswith("step 3:")
    assert withhold(batch(COUNTS), planned.waiting) == (planned.batch, planned.deferred)
    again = made.plan_ladder(batch(COUNTS))
    assert (again.waiting, again.deferred) == (planned.waiting, planned.deferred)


def test_what_waited_comes_first_in_the_next_batch_and_does_not_wait_again() -> None:
    made = planner(4, cap(0.8), name="exact", defer=True, max_waves=1)
    first = made.plan_ladder(batch(COUNTS))
    following = carry(batch(COUNTS, step=4), first.deferred)
    waited = [key for key, _ in first.deferred]
    assert [s.key for s in following.sequences[: len(waited)]] == waited
    assert following.window_sequences == len(following.sequences) == 54 + len(waited)
    assert following.window_tokens == following.num_tokens
    fresh = replace(following, sequences=tuple(replace(s, key=f"{s.index}") for s in following.sequences))
    keys = {s.key for s in fresh.sequences[: len(waited)]}
    second = made.plan_ladder(fresh, carried=keys)
    assert second.deferred
    assert not keys & {key for key, _ in second.deferred}
    assert carry(batch(COUNTS), ()) == batch(COUNTS)


def test_it_is_off_by_default_and_refused_inside_an_accumulation_window() -> None:
    with pytest.raises(PlanningError, match=r"defer=true"):
        planner(4, cap(0.8), name="exact", max_waves=1).plan_ladder(batch(COUNTS))
    made = planner(4, cap(0.8), name="exact", max_waves=1, defer=True)
    with pytest.raises(PlanningError, match="does not fit in 1 waves"):
        made.plan_ladder(replace(batch(COUNTS), window_sequences=108))


def test_a_sequence_that_fits_no_option_is_named_instead() -> None:
    made = planner(2, 3_000, name="exact", defer=True)
    with pytest.raises(PlanningError, match="'v720/1'"):
        made.plan_ladder(batch({"i256": 1, "v720": 1}))


def test_a_batch_that_only_holds_carried_sequences_fails() -> None:
    made = planner(4, cap(0.8), name="exact", max_waves=1, defer=True)
    with pytest.raises(PlanningError, match="does not fit in 1 waves"):
        made.plan_ladder(batch(COUNTS), carried=[s.key for s in batch(COUNTS).sequences])
