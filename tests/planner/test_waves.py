"""Batches that do not fit at once: waves cover the batch, keep its window, and each one plans."""

from __future__ import annotations

import pytest

from tests.planner.toys import BUCKETS, MEMORY, batch, planner
from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import WHOLE

MIXED = {"v480": 6, "i720": 40, "i256": 60}


def mean_memory(counts: dict[str, int], world: int) -> float:
    return sum(n * MEMORY.memory_mib(BUCKETS[name].num_tokens, WHOLE) for name, n in counts.items()) / world


def test_a_batch_that_fits_is_one_wave() -> None:
    what = batch(MIXED)
    made = planner(4, name="exact")
    (wave,) = made.plan_waves(what)
    assert wave.batch == what
    assert wave.members == tuple(range(len(what.sequences)))
    assert wave.plan.digest == made.plan(what).digest


@pytest.mark.parametrize("name", ["exact", "paper"])
@pytest.mark.parametrize("share", [0.75, 0.5, 0.3])
def test_tight_batches_are_cut(share: float, name: str) -> None:
    what, cap = batch(MIXED), int(mean_memory(MIXED, 4) * share)
    waves = planner(4, cap, name=name).plan_waves(what)
    assert 1 / share <= len(waves) <= 1 / share + 2
    assert sorted(m for wave in waves for m in wave.members) == list(range(len(what.sequences)))
    for wave in waves:
        assert [s.key for s in wave.batch.sequences] == [what.sequences[m].key for m in wave.members]
        assert [s.index for s in wave.batch.sequences] == list(range(len(wave.members)))
        assert (wave.batch.window_sequences, wave.batch.window_tokens) == (
            len(what.sequences),
            what.num_tokens,
        )
        assert max(wave.plan.memory_mib) <= cap
        assert len(wave.plan.options) == len(wave.members)


def test_waves_are_the_same_every_time() -> None:
    cap = int(mean_memory(MIXED, 4) * 0.6)
    runs = [planner(4, cap, name="exact").plan_waves(batch(MIXED)) for _ in range(2)]
    assert [w.members for w in runs[0]] == [w.members for w in runs[1]]
    assert [w.plan.digest for w in runs[0]] == [w.plan.digest for w in runs[1]]


def test_waves_do_not_help_a_sequence_that_fits_nowhere() -> None:
    with pytest.raises(PlanningError, match="'v720/1'"):
        planner(2, 3_000, name="exact").plan_waves(batch({"i256": 1, "v720": 1}))


def test_an_empty_batch_is_one_empty_wave() -> None:
    (wave,) = planner(2, name="exact").plan_waves(batch({}))
    assert (wave.members, wave.plan.options) == ((), ())


def test_another_wave_is_taken_where_it_is_faster() -> None:
    """Memory is too tight to split the one video, so one wave waits for it; in two waves it may be split."""
    counts = {"v720": 1, "i720": 120, "i256": 600}
    what, cap = batch(counts), int(mean_memory(counts, 4) * 1.005)
    free = planner(4, 10**6, name="exact").plan(what).makespan_us
    made = planner(4, cap, name="exact")
    assert made.plan(what).makespan_us > 3 * free
    waves = made.plan_waves(what)
    assert len(waves) == 2
    assert sum(wave.plan.makespan_us for wave in waves) <= 1.01 * free
