"""Prices that follow the run: what steps took, compared with what was predicted, corrects later plans.

All ranks see the same measurements (they are gathered after each step) and hold the same window of them. Rank
0 computes the next correction and shares it, because floating-point sums may differ between machines. A
correction holds from the first batch that nobody has been asked to plan yet, so the step at which prices
change depends on no thread. Everything that later plans depend on is part of the checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from zellige_lightning.agreement import Agreement
from zellige_lightning.errors import ZelligeError
from zellige_lightning.placement import GlobalBatch, ParallelConfig, Plan, Topology
from zellige_lightning.placement.sequence import digest63
from zellige_lightning.planner import ProfileTable
from zellige_lightning.planner.correction import PriceCorrection
from zellige_lightning.planner.cost import PriceKey
from zellige_lightning.planner.precedent import Precedent
from zellige_lightning.planner.problem import RankSet
from zellige_lightning.planner.repricing import describe, neutral, reprice
from zellige_lightning.planner.residuals import Observation

WINDOW = 24  # steps that are looked back on
INTERVAL = 4  # steps between two decisions; more with many ranks, where one costs more
RANKS_PER_STEP = 32  # one step more between two decisions for each of so many ranks
COLD_STEPS = 2  # first steps of a job, which compile and allocate
RECENT = 5  # steps whose median is the present error
JUMP_FACTOR, JUMP_PERMILLE = 2, 30  # an error of so much more than before is drift


@dataclass(frozen=True)
class Expectation:
    """What a step is expected to take by the profile, see `Observation`."""

    cells: tuple[tuple[PriceKey | None, RankSet, int], ...]
    rest_us: tuple[int, ...]


@dataclass(frozen=True)
class PriceVersion:
    """Prices from a batch on.

    Args:
        first_step: number of the first global batch that is planned with them.
        table: as measured.
        correction: of these.
    """

    first_step: int
    table: ProfileTable
    correction: PriceCorrection


class OnlinePrices:
    """The prices of a run, its measurements, and what follows from them.

    Args:
        table: as measured.
        agreement: of the training thread.
        warmup: measured steps before the first correction; None for prices that are never corrected.
    """

    def __init__(
        self, table: ProfileTable, topology: Topology, agreement: Agreement, warmup: int | None
    ) -> None:
        self._topology, self._agreement, self._warmup = topology, agreement, warmup
        self._versions: tuple[PriceVersion, ...] = (PriceVersion(0, table, PriceCorrection()),)
        self._window: deque[Observation] = deque(maxlen=WINDOW)
        self._seen = self._changes = 0
        self._usual: int | None = None  # error before an alarm, per mille; None while there is none

    def as_measured(self) -> OnlinePrices:
        """Prices that nothing corrects, for what is not trained on."""
        return OnlinePrices(self._versions[0].table, self._topology, self._agreement, None)

    @property
    def corrects(self) -> bool:
        return self._warmup is not None

    @property
    def num_changes(self) -> int:
        """Price versions so far, beside the first."""
        return self._changes

    def at(self, step: int) -> PriceVersion:
        """The prices of a batch. Any thread may ask: what holds for a batch that is asked for stays."""
        return next(v for v in reversed(self._versions) if v.first_step <= step)

    def expect(self, step: int, waves: Sequence[tuple[GlobalBatch, Plan]]) -> Expectation:
        """What the waves of a step are expected to take by the profile as measured."""
        table = self.at(step).table
        starts = [table.start_loads_us(plan.options, self._topology) for _, plan in waves]
        cells = []
        for (bucket, config, ranks), count in _count(waves).items():
            where = self._topology.class_of(ranks)
            price = table.price_us(bucket, config, where) or 0
            key = None if table.is_adhoc(bucket) else (bucket.name, config, where)
            cells.append((key, ranks, count * price))
        fixed = len(waves) * table.fixed_us
        return Expectation(tuple(cells), tuple(fixed + sum(rows) for rows in zip(*starts, strict=True)))

    def observe(self, observation: Observation, first_step: int) -> list[str]:
        """Takes a measured step in; decides where it is time to. A collective of all ranks.

        Args:
            first_step: the first batch that no rank has been asked to plan yet.

        Returns:
            What is worth a line in the log.
        """
        if self._warmup is None:
            return []
        self._seen += 1
        if self._seen <= COLD_STEPS:
            return []
        self._window.append(observation)
        lines, alarmed = self._watch(observation.step)
        if self._seen < self._warmup + COLD_STEPS:
            return lines
        interval = INTERVAL + self._topology.world_size // RANKS_PER_STEP
        if alarmed or (self._seen - self._warmup - COLD_STEPS) % interval == 0:
            lines += self._decide(first_step)
        return lines

    def _watch(self, step: int) -> tuple[list[str], bool]:
        """Lines about drift, and whether it was noticed just now. A jump makes what was measured before it
        worthless, so it is forgotten; a single spike is no jump."""
        errors = [observation.error_permille for observation in self._window]
        if len(errors) < 2 * RECENT:
            return [], False
        recent, before = int(median(errors[-RECENT:])), int(median(errors[:-RECENT]))
        if self._usual is None and recent > JUMP_FACTOR * before + JUMP_PERMILLE:
            self._usual = before
            self._window = deque(list(self._window)[-RECENT:], maxlen=WINDOW)
            text = f"makespan error {recent / 10:.1f} %, before {before / 10:.1f} %"
            return [f"drift alarm at step {step}: {text}"], True
        if self._usual is not None and recent <= JUMP_FACTOR * self._usual + JUMP_PERMILLE // 2:
            text = f"step {step}: makespan error is back at {recent / 10:.1f} %"
            self._usual = None
            return [f"{text} with price version {self.at(step).correction.version}"], False
        return [], False

    def _decide(self, first_step: int) -> list[str]:
        newest = self._versions[-1]
        shared = self._agreement.on_first(lambda: reprice(tuple(self._window), newest.correction).to_json())
        correction = PriceCorrection.from_json(shared)
        if correction == newest.correction:
            return []
        self._switch(replace(newest, first_step=first_step, correction=correction))
        causes = describe(newest.correction, correction)
        head = f"price version {correction.version} from step {first_step} on"
        return [*causes, head] if causes else []

    def _switch(self, version: PriceVersion) -> None:
        """Whoever plans an earlier batch still finds its prices: all but the versions that have been replaced
        before the last batch are kept."""
        self._changes += 1
        done = self._window[-1].step if self._window else version.first_step
        old = [v for v in self._versions if v.first_step < version.first_step]
        current = max((n for n, v in enumerate(old) if v.first_step <= done), default=0)
        self._versions = (*old[current:], version)

    def remeasured(self, table: ProfileTable, first_step: int) -> None:
        """Prices were measured anew: what was learnt about the old ones is forgotten, but for slow ranks."""
        self._window.clear()
        self._usual = None
        self._switch(PriceVersion(first_step, table, neutral(self._versions[-1].correction)))

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data; empty where nothing was learnt."""
        if self._warmup is None or not self._seen:
            return {}
        return {
            "profile": self._versions[-1].table.version,
            "world_size": self._topology.world_size,
            "versions": [[v.first_step, v.correction.to_json()] for v in self._versions],
            "window": [_to_row(observation) for observation in self._window],
            "counters": [self._seen, self._changes, -1 if self._usual is None else self._usual],
        }

    def restore(self, state: Mapping[str, Any]) -> str:
        """Goes on from a checkpoint; a reason where that is not possible and prices start anew.

        Raises:
            ZelligeError: a state that is none.
        """
        if self._warmup is None or not state:
            return ""
        table = self._versions[-1].table
        here = (table.version, self._topology.world_size)
        if (there := (state.get("profile"), state.get("world_size"))) != here:
            what = "profile" if there[0] != here[0] else "world size"
            return f"prices are corrected from the start again: the checkpoint is of another {what}"
        try:
            made = [(int(step), PriceCorrection.from_json(text)) for step, text in state["versions"]]
            self._versions = tuple(PriceVersion(step, table, correction) for step, correction in made)
            self._window = deque(map(_of_row, state["window"]), maxlen=WINDOW)
            self._seen, self._changes, usual = map(int, state["counters"])
            self._usual = None if usual < 0 else usual
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ZelligeError(
                f"the checkpoint's corrected prices cannot be read: {error}", fix="resume from another one"
            ) from error
        return ""


def _count(waves: Sequence[tuple[GlobalBatch, Plan]]) -> dict[tuple[Any, ParallelConfig, RankSet], int]:
    counts: dict[tuple[Any, ParallelConfig, RankSet], int] = {}
    for batch, plan in waves:
        for sequence, option in zip(batch.sequences, plan.options, strict=True):
            key = sequence.bucket, option.config, option.ranks
            counts[key] = counts.get(key, 0) + 1
    return counts


def _to_row(observation: Observation) -> list[Any]:
    cells = [
        [[key[0], [key[1].q, key[1].h, key[1].k], key[2]] if key else None, list(ranks), us]
        for key, ranks, us in observation.cells
    ]
    times = [observation.predicted_us, observation.makespan_us]
    return [observation.step, cells, list(observation.rest_us), list(observation.measured_us), times]


def _of_row(row: Sequence[Any]) -> Observation:
    step, cells, rest, measured, (predicted, makespan) = row
    made = tuple(
        (
            None if key is None else (str(key[0]), ParallelConfig(*key[1]), str(key[2])),
            tuple(map(int, ranks)),
            int(us),
        )
        for key, ranks, us in cells
    )
    times = tuple(map(int, rest)), tuple(map(int, measured))
    return Observation(int(step), made, *times, int(predicted), int(makespan))


def saved(prices: OnlinePrices, precedent: Precedent) -> dict[str, Any]:
    """What a checkpoint holds of prices and of the last plan, with the digests that tell them apart."""
    state = prices.state()
    if not state:
        return {}
    return {**state, "previous_plan": precedent.to_json(), "previous_digest": precedent.digest}


def precedent_in(state: Mapping[str, Any]) -> Precedent:
    """The last plan of a checkpoint.

    Raises:
        ZelligeError: it is not the plan that the checkpoint was written with.
    """
    if "previous_plan" not in state:
        return Precedent()
    precedent = Precedent.from_json(state["previous_plan"])
    if precedent.digest != state.get("previous_digest"):
        raise ZelligeError(
            "the previous plan in the checkpoint does not have its digest", fix="resume from another one"
        )
    return precedent


def stamp(version: PriceVersion, precedent: Precedent) -> int:
    """63 bits of what all ranks must have alike before they plan, beside the batch."""
    return digest63(f"{version.table.version}|{version.correction.version}|{precedent.digest}")


def observation_of(
    step: int, expectation: Expectation, times: Sequence[tuple[int, int]], predicted_us: int, measured_us: int
) -> Observation:
    """A step as it was measured.

    Args:
        times: (wall, own) of each rank, microseconds; see `StepTimer`. What the slowest rank still waits for
            behind its own work (the last gradients' reduction) is part of every rank's time, as the profile's
            fixed step cost is.
    """
    tail = max(wall for wall, _ in times) - max(own for _, own in times)
    measured = tuple(own + max(0, tail) for _, own in times)
    cells, rest = expectation.cells, expectation.rest_us
    return Observation(step, cells, rest, measured, predicted_us, measured_us)
