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
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from zellige_lightning.agreement import Agreement
from zellige_lightning.batch import RankBatch
from zellige_lightning.engine.observer import name_of
from zellige_lightning.errors import EngineError
from zellige_lightning.placement import Plan, RankSchedule, build_schedule
from zellige_lightning.placement.schedule import padded
from zellige_lightning.placement.sequence import digest63

Agreed = tuple[Plan, RankSchedule]
NO_REPORT = (0, 0, 0)  # of a rank that has failed
_FIX = "let ZelligeDataModule hand out the batches, and change no plan or schedule on one rank"


def report_of(step: int, waves: Sequence[RankBatch], rank: int) -> list[int]:
    """Step, digest of what is placed where, and whether this rank's schedules follow from it."""
    # The planned memory decides which attention is kept, so what is exchanged in backward.
    told = (f"{w.plan.digest} {w.plan.memory_mib} {w.global_batch.digest}" for w in waves)
    digest = digest63("|".join(told))
    return [step, digest, int(all(not _astray(wave, rank) for wave in waves))]


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
    usual, differing, astray = compare(reports)
    if differing:
        theirs, its = (agreement.share(_account(waves), rank) for rank in (usual, differing[0]))
        what = f"{_differ(reports, usual, differing)}{_first_difference(theirs, its)}"
    elif astray:
        mine = next(filter(None, (_astray(wave, agreement.rank) for wave in waves)), "")
        block = agreement.share(mine, astray[0])
        what = f"the schedule of ranks {astray} is not what their plan says: {block}"
    else:
        return
    error = EngineError(
        f"before the first exchange of step {step} (forward, layer 0), {what}", fix=_FIX, step=step
    )
    error.agreed = True
    raise error


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
        f"before the first exchange of a step (forward, layer 0), this rank is about to run {what}",
        fix=_FIX,
        step=step,
    )


def compare(reports: Sequence[Sequence[int]]) -> tuple[int, list[int], list[int]]:
    """(a rank with the usual plan, ranks with another one, ranks that do not follow their plan).

    Those who are fewer are the ones that differ; of equally many, those without rank 0.
    """
    plans = [(step, digest) for step, digest, _ in reports]
    counts = Counter(plans)
    usual = max(counts, key=lambda plan: (counts[plan], plan == plans[0]))
    differing = [rank for rank, plan in enumerate(plans) if plan != usual]
    astray = [rank for rank, (_, _, follows) in enumerate(reports) if not follows]
    return plans.index(usual), differing, astray


def _differ(reports: Sequence[Sequence[int]], usual: int, differing: Sequence[int]) -> str:
    shown = ", ".join(
        f"rank {rank} (step {reports[rank][0]}, digest {reports[rank][1]})" for rank in differing
    )
    step, digest, _ = reports[usual]
    return f"{shown} has another plan than the others (step {step}, digest {digest})"


def _account(waves: Sequence[RankBatch]) -> str:
    """Where each sequence of each wave is placed, as JSON."""
    return json.dumps(
        [
            [
                [str(option.config), option.ranks, length]
                for option, length in zip(wave.plan.options, _lengths(wave), strict=True)
            ]
            for wave in waves
        ]
    )


def _first_difference(usual: str, other: str) -> str:
    """The first sequence that two accounts place differently."""
    waves = zip_longest(json.loads(usual), json.loads(other), fillvalue=())
    for number, (theirs, its) in enumerate(waves):
        for index, (a, b) in enumerate(zip_longest(theirs, its)):
            if a != b:
                return f": sequence {index} of wave {number} is {_placed(a)} for them, {_placed(b)} for it"
    return ": other sequences, or other planned memory"


def _placed(entry: list[Any] | None) -> str:
    if entry is None:
        return "absent"
    config, ranks, length = entry
    return f"{length} tokens {config} on ranks {tuple(ranks)}"


def _lengths(wave: RankBatch) -> list[int]:
    return [sequence.num_tokens for sequence in wave.global_batch.sequences]


def _astray(wave: RankBatch, rank: int) -> str:
    """The first block of a rank's schedule that its plan does not say, or the first that is missing; empty if
    it follows its plan."""
    plan, found = wave.plan, wave.schedule
    expected = build_schedule(plan.options, _lengths(wave), rank, plan.world_size)
    if found in (expected, full := padded(expected)):
        return ""
    pairs = zip_longest(found.blocks, full.blocks)
    block = next((a or b for a, b in pairs if a != b), None)
    return f"it is that of rank {found.rank}" if block is None else name_of(block)
