"""When a global batch does not fit at once: waves, planned parts whose losses add up to the same mean."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import Plan
from zellige_lightning.placement.sequence import Bucket, GlobalBatch
from zellige_lightning.planner.bounds import lower_bound
from zellige_lightning.planner.config import MOST_WAVES

if TYPE_CHECKING:
    from zellige_lightning.planner.planner import BatchPlanner

WORTH_A_WAVE = 0.02  # excess over the area bound above which another wave is tried


@dataclass(frozen=True)
class Wave:
    """A planned part of a global batch.

    Args:
        members: indices in the whole batch, ascending.
        batch: these sequences, indexed from 0, in the accumulation window of the whole batch, so that the
            token weights of all waves together are those of the whole batch.
        plan: of `batch`.
    """

    members: tuple[int, ...]
    batch: GlobalBatch
    plan: Plan


def plan_waves(planner: BatchPlanner, batch: GlobalBatch, most_waves: int = MOST_WAVES) -> list[Wave]:
    """The batch as the fewest waves that all plan; one if it fits at once. One wave more where that is
    predicted to take less time, as it may where the fewest barely fit (every wave pays the fixed step cost).

    Raises:
        PlanningError: a sequence fits no option, or `most_waves` are not enough.
    """
    needs = least_memory(planner, batch)
    room = planner.menu.topology.world_size * planner.menu.cap_mib
    fewest = max(1, ceil(sum(needs) / room))
    ideal_us = lower_bound(planner.problem(batch)[0])[0]
    error: PlanningError | None = None
    for number in range(fewest, most_waves + 1):
        try:
            waves = _plan_all(planner, batch, needs, number)
        except PlanningError as failed:
            error = failed
            continue
        if sum(wave.plan.makespan_us for wave in waves) <= (1 + WORTH_A_WAVE) * ideal_us:
            return waves
        if number < most_waves:
            with suppress(PlanningError):
                return min(waves, _plan_all(planner, batch, needs, number + 1), key=_total_us)
        return waves
    raise PlanningError(
        f"the batch does not fit in {most_waves} waves"
        + (f"; the last attempt: {error.message}" if error else f", its memory alone needs {fewest}"),
        fix="raise planner.memory_cap_gib or planner.max_waves, lower the tokens per batch, or set "
        "planner.defer=true",
        step=batch.step,
    )


def _total_us(waves: list[Wave]) -> int:
    return sum(wave.plan.predicted_us for wave in waves)


def _plan_all(planner: BatchPlanner, batch: GlobalBatch, needs: list[int], number: int) -> list[Wave]:
    parts = [members for members in _deal(needs, number) if members or not needs]
    return [_plan_wave(planner, batch, members) for members in parts]


def least_memory(planner: BatchPlanner, batch: GlobalBatch) -> list[int]:
    """Least memory over all ranks that each sequence takes, MiB. Raises: PlanningError where one fits no
    option."""
    needs: dict[Bucket, int] = {}
    for sequence in batch.sequences:
        if sequence.bucket not in needs:
            choices = planner.menu.choices(sequence.bucket)
            if not choices:
                raise planner.menu.does_not_fit(sequence, batch.step)
            needs[sequence.bucket] = min(c.config.degree * c.memory_mib for c in choices)
    return [needs[sequence.bucket] for sequence in batch.sequences]


def _deal(needs: list[int], number: int) -> Iterable[tuple[int, ...]]:
    """Largest need first, to the wave with the least memory (ties: the fewest sequences, then the first)."""
    waves: list[list[int]] = [[] for _ in range(number)]
    totals = [0] * number
    for index in sorted(range(len(needs)), key=lambda i: (-needs[i], i)):
        wave = min(range(number), key=lambda w: (totals[w], len(waves[w]), w))
        waves[wave].append(index)
        totals[wave] += needs[index]
    return [tuple(sorted(wave)) for wave in waves]


def _plan_wave(planner: BatchPlanner, batch: GlobalBatch, members: tuple[int, ...]) -> Wave:
    sequences = tuple(replace(batch.sequences[m], index=i) for i, m in enumerate(members))
    part = replace(batch, sequences=sequences)
    return Wave(members, part, planner.plan(part))
