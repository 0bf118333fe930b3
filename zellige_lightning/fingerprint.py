"""Whether all ranks are about to run the same plan, known before the first exchange of a step: on gloo a rank
with another plan ends all others with a size mismatch, and on NCCL they exchange wrong rows.

Fingerprints ride in the agreement that ends the preparation of a step (`lookahead.py`), so they cost no
collective. From then on each rank holds what it is about to run against what was agreed, alone. With
`engine.debug=true` the ranks compare once more, right before the step: that also finds ranks of which one has
skipped a batch.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from zellige_lightning.agreement import Agreement
from zellige_lightning.batch import RankBatch
from zellige_lightning.engine.observer import name_of
from zellige_lightning.errors import EngineError, PlanningError
from zellige_lightning.placement import GlobalBatch, Plan, RankSchedule, build_schedule
from zellige_lightning.placement.schedule import padded
from zellige_lightning.placement.sequence import digest63

Agreed = tuple[Plan, RankSchedule]
Placed = Sequence[tuple[GlobalBatch, Plan]]  # the waves of a step
NO_REPORT = (0, 0, 0)  # of a rank that has failed
_FIX = "let ZelligeDataModule hand out the batches, and change no plan or schedule on one rank"


@contextmanager
def reading_plan(step: int) -> Iterator[None]:
    """What a plan is refused for while it is read is said to be so before anything was exchanged."""
    try:
        yield
    except (PlanningError, EngineError) as error:
        error.message, error.step = f"{_before(step)}, {error.message}", step
        raise


def _before(step: int) -> str:
    return f"before the first exchange of step {step} (forward, layer 0)"


def report_of(step: int, waves: Sequence[RankBatch], rank: int) -> list[int]:
    """Step, digest of what is placed where, and whether this rank's schedules follow from it."""
    return [*placement_report(step, _placed(waves))[:2], int(all(not _astray(wave, rank) for wave in waves))]


def placement_report(step: int, placed: Placed) -> list[int]:
    """`report_of` plans that no schedule was made from yet."""
    # The planned memory decides which attention is kept, so what is exchanged in backward.
    told = (f"{plan.digest} {plan.memory_mib} {batch.digest}" for batch, plan in placed)
    return [step, digest63("|".join(told)), 1]


def require_one_plan(
    agreement: Agreement, step: int, reports: Sequence[Sequence[int]], waves: Sequence[RankBatch]
) -> None:
    """Compare what all ranks reported. A collective where they differ, and only there.

    Args:
        reports: `report_of` every rank, by rank; the same on all ranks.
        waves: of this rank.

    Raises:
        EngineError: some rank differs; the same error on all ranks, naming the step, those ranks, and the
            first sequence or block in which they differ, with its rank set.
    """
    require_one_placement(agreement, step, reports, _placed(waves))
    if astray := [rank for rank, (*_, follows) in enumerate(reports) if not follows]:
        mine = next(filter(None, (_astray(wave, agreement.rank) for wave in waves)), "")
        block = agreement.share(mine, astray[0])
        raise _agreed_error(step, f"the schedule of ranks {astray} is not what their plan says: {block}")


def require_one_placement(
    agreement: Agreement, step: int, reports: Sequence[Sequence[int]], placed: Placed
) -> None:
    """`require_one_plan`, without schedules."""
    usual, differing = compare(reports)
    if differing:
        theirs, its = (agreement.share(_account(placed), rank) for rank in (usual, differing[0]))
        what = f"{_differ(reports, usual, differing)}{_first_difference(theirs, its)}"
        raise _agreed_error(step, what)


def _agreed_error(step: int, what: str) -> EngineError:
    error = EngineError(f"{_before(step)}, {what}", fix=_FIX, step=step)
    error.agreed = True
    return error


def require_agreed(batch: RankBatch, agreed: Agreed, step: int | None) -> None:
    """Hold what is about to run against what the ranks agreed on.

    Raises:
        EngineError: a hook has changed the plan or the schedule since; on this rank, before it exchanges.
    """
    plan, schedule = agreed
    if batch.plan == plan and batch.schedule == schedule:
        return
    pairs = zip_longest(batch.schedule.blocks, schedule.blocks)
    blocks = next(((a, b) for a, b in pairs if a != b), (None, None))
    is_now, was = ("nothing" if block is None else name_of(block) for block in blocks)
    what = f"{is_now}, agreed was {was}" if is_now != was else "blocks of another plan"
    raise EngineError(
        f"{_before(plan.step)}, this rank is about to run {what}",
        fix=_FIX,
        step=step,
    )


def compare(reports: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """(a rank with the usual plan, ranks with another one).

    Those who are fewer are the ones that differ; of equally many, those without rank 0.
    """
    plans = [(step, digest) for step, digest, _ in reports]
    counts = Counter(plans)
    usual = max(counts, key=lambda plan: (counts[plan], plan == plans[0]))
    return plans.index(usual), [rank for rank, plan in enumerate(plans) if plan != usual]


def _differ(reports: Sequence[Sequence[int]], usual: int, differing: Sequence[int]) -> str:
    shown = ", ".join(
        f"rank {rank} (step {reports[rank][0]}, digest {reports[rank][1]})" for rank in differing
    )
    step, digest, _ = reports[usual]
    return f"{shown} has another plan than the others (step {step}, digest {digest})"


def _placed(waves: Sequence[RankBatch]) -> Placed:
    return [(wave.global_batch, wave.plan) for wave in waves]


def _account(placed: Placed) -> str:
    """Where each sequence of each wave is placed, as JSON."""
    return json.dumps(
        [
            [
                [str(option.config), option.ranks, length]
                for option, length in zip(plan.options, _lengths(batch), strict=True)
            ]
            for batch, plan in placed
        ]
    )


def _first_difference(usual: str, other: str) -> str:
    """The first sequence that two accounts place differently."""
    waves = zip_longest(json.loads(usual), json.loads(other), fillvalue=())
    for number, (theirs, its) in enumerate(waves):
        for index, (a, b) in enumerate(zip_longest(theirs, its)):
            if a != b:
                return (
                    f": sequence {index} of wave {number} is {_in_words(a)} for them, {_in_words(b)} for it"
                )
    return ": other sequences, or other planned memory"


def _in_words(entry: list[Any] | None) -> str:
    if entry is None:
        return "absent"
    config, ranks, length = entry
    return f"{length} tokens {config} on ranks {tuple(ranks)}"


def _lengths(batch: GlobalBatch) -> list[int]:
    return [sequence.num_tokens for sequence in batch.sequences]


def _astray(wave: RankBatch, rank: int) -> str:
    """The first block of a rank's schedule that its plan does not say, or the first that is missing; empty if
    it follows its plan."""
    plan, found = wave.plan, wave.schedule
    expected = build_schedule(plan.options, _lengths(wave.global_batch), rank, plan.world_size)
    if found in (expected, full := padded(expected)):
        return ""
    pairs = zip_longest(found.blocks, full.blocks)
    block = next((a or b for a, b in pairs if a != b), None)
    return f"it is that of rank {found.rank}" if block is None else name_of(block)
