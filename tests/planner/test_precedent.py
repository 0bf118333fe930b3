"""Do no harm: plans change, and split, only for gains above the noise, and depend on what is given alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.toys import batch, planner, table
from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import Plan
from zellige_lightning.placement.sequence import GlobalBatch
from zellige_lightning.planner.correction import PriceCorrection
from zellige_lightning.planner.planner import BatchPlanner
from zellige_lightning.planner.precedent import KEPT, Precedent

COUNTS = {"v480": 5, "i720": 12, "i256": 60}
NONE, PLAIN = Precedent(), PriceCorrection()


def exact(correction: PriceCorrection = PLAIN, precedent: Precedent = NONE) -> BatchPlanner:
    made = planner(4, name="exact")
    made.use(table(4), correction, precedent)
    return made


def of(what: GlobalBatch, plan: Plan) -> Precedent:
    return Precedent.of([(what, plan)])


def test_within_the_noise_nothing_is_split() -> None:
    what = batch(COUNTS)
    best = exact().plan(what)
    assert best.num_splits > 0
    whole_us = exact(PriceCorrection(noise=1000)).plan(what).makespan_us
    gain = 1000 * (whole_us - best.makespan_us) / best.makespan_us
    assert gain > 20  # splitting pays for this batch, by more than 2 %
    above, below = (exact(PriceCorrection(noise=int(gain) + d)).plan(what) for d in (2, -10))
    assert above.num_splits == 0 and above.statuses == KEPT and above.makespan_us == whole_us
    assert above.lower_bound_us == best.lower_bound_us <= best.makespan_us
    assert below.digest == best.digest and below.statuses == best.statuses


def mirrored(past: Precedent) -> Precedent:
    """The same with neighbouring ranks exchanged: as good, and another plan."""
    waves = [[(n, c, tuple(sorted(r ^ 1 for r in ranks)), k) for n, c, ranks, k in w] for w in past.waves]
    return Precedent(tuple(tuple(sorted(wave)) for wave in waves))


def test_the_previous_plan_stays_unless_another_is_clearly_better() -> None:
    what = batch({"v480": 6, "i720": 13, "i256": 61})
    first = exact().plan(what)
    past = mirrored(of(what, first))
    assert past != of(what, first)
    kept = exact(PriceCorrection(noise=1), past).plan(what)
    assert of(what, kept) == past and kept.statuses == KEPT and kept.makespan_us == first.makespan_us
    # a rank that takes twice as long is worth a change
    changed = exact(PriceCorrection(ranks=(0, 14, 0, 0), noise=50), past).plan(what)
    assert of(what, changed) != past
    assert changed.makespan_us < 0.9 * 2 * first.makespan_us


def test_a_previous_plan_of_another_batch_says_nothing() -> None:
    what, another = batch(COUNTS), batch({"v480": 2, "i256": 9})
    correction = PriceCorrection(noise=10)
    past = of(another, exact().plan(another))
    assert exact(correction, past).plan(what).digest == exact(correction).plan(what).digest


def test_plans_are_functions_of_what_is_given_whatever_the_planner_has_seen() -> None:
    what, made = batch(COUNTS), planner(4, name="exact")
    past = of(what, made.plan(what))
    corrections = [PriceCorrection(noise=n, ranks=r) for n in (0, 10, 50) for r in ((), (0, 8, 0, 0))]
    fresh = [exact(c, p).plan(what) for c in corrections for p in (NONE, past)]
    seen = []
    for correction in corrections:
        for precedent in (NONE, past):
            made.use(table(4), correction, precedent)
            seen.append(made.plan(what))
    strip = [replace(plan, solve_ms=0.0) for plan in seen]
    assert strip == [replace(plan, solve_ms=0.0) for plan in fresh]
    assert made.num_hits == 1 + len(corrections)  # the previous plan is chosen after the cache
    assert {plan.price_version for plan in seen} == {c.version for c in corrections}


def test_old_versions_stay_in_the_cache_and_new_tables_empty_it() -> None:
    what, made, other = batch(COUNTS), exact(), PriceCorrection(ranks=(0, 8, 0, 0))
    for correction in (PriceCorrection(), other, PriceCorrection(), other):
        made.use(table(4), correction, NONE)
        made.plan(what)
    assert (made.num_plans, made.num_hits) == (4, 2)
    made.use(table(4, fixed_us=700), other, NONE)
    assert made.plan(what).fixed_us == 700 and made.num_hits == 2


def test_precedents_travel_as_text() -> None:
    what = batch(COUNTS)
    past = of(what, exact().plan(what))
    again = Precedent.from_json(past.to_json())
    assert again == past and again.digest == past.digest != NONE.digest
    for text in (
        "",
        "{",
        "[[[1, [1,1,1], [0], 1]]]",
        '[[["a", [1,1,1], [0], 0]]]',
        '[[["a", [0,1,1], [0], 1]]]',
    ):
        with pytest.raises(PlanningError):
            Precedent.from_json(text)
