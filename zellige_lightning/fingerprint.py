"""Whether all ranks are about to run the same plan, asked before the first exchange of a step.

It need not be asked in every run: the planner's text comes from rank 0 to everybody (`lookahead.py`), the
global batches that it places have been compared by digest, and a schedule is a pure function of the two.
Where that is in doubt (memory that flips bits, a hook that replaces batches), `engine.debug=true` asks, since
on gloo a rank with another plan ends all others with a size mismatch, and on NCCL exchanges wrong rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zellige_lightning.agreement import Agreement
from zellige_lightning.batch import RankBatch
from zellige_lightning.errors import EngineError
from zellige_lightning.placement import build_schedule
from zellige_lightning.placement.schedule import padded
from zellige_lightning.placement.sequence import digest63


def require_one_plan(agreement: Agreement, step: int, waves: Sequence[RankBatch]) -> None:
    """Compare step, plan and schedule order of all ranks. A collective.

    Raises:
        EngineError: some rank differs; the same error on all ranks, naming the step and those ranks.
    """
    follows = all(_follows_its_plan(wave, agreement.rank) for wave in waves)
    digest = digest63("|".join(f"{wave.plan.digest} {_lengths(wave)}" for wave in waves))
    reports = agreement.gather([step, digest, int(follows)])
    if wrong := disagreement(reports):
        error = EngineError(
            f"before the first exchange of step {step}, {wrong}",
            fix="let ZelligeDataModule hand out the batches, and change no plan or schedule on one rank",
            step=step,
        )
        error.agreed = True
        raise error


def disagreement(reports: Sequence[Sequence[int]]) -> str:
    """What is wrong with the (step, digest, follows its plan) of all ranks, by rank; empty if nothing.

    Those who are fewer are the ones that differ; of equally many, those without rank 0.
    """
    plans = [(step, digest) for step, digest, _ in reports]
    counts = Counter(plans)
    usual = max(counts, key=lambda plan: (counts[plan], plan == plans[0]))
    if differing := [rank for rank, plan in enumerate(plans) if plan != usual]:
        shown = ", ".join(
            f"rank {rank} (step {plans[rank][0]}, digest {plans[rank][1]})" for rank in differing
        )
        return f"{shown} has another plan than the others (step {usual[0]}, digest {usual[1]})"
    if astray := [rank for rank, (_, _, follows) in enumerate(reports) if not follows]:
        return f"the schedule of ranks {astray} is not what their plan says"
    return ""


def _lengths(wave: RankBatch) -> list[int]:
    return [sequence.num_tokens for sequence in wave.global_batch.sequences]


def _follows_its_plan(wave: RankBatch, rank: int) -> bool:
    plan = wave.plan
    expected = build_schedule(plan.options, _lengths(wave), rank, plan.world_size)
    return wave.schedule in (expected, padded(expected))
