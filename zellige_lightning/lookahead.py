"""Plans and reads the next global batch in the background while the current one trains.

Lightning never prefetches `on_before_batch_transfer`, so planning there would be fully exposed. Here the
loader that Lightning iterates hands out *pending* batches: a thread with a gloo group of its own agrees,
plans, shares and reads them one step ahead, across epoch ends too; the hook only waits for what is not
ready yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence as Rows
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from zellige_lightning.agreement import Agreement
from zellige_lightning.background import Background
from zellige_lightning.batch import RankBatch, materialize
from zellige_lightning.correction import Expectation, OnlinePrices, PriceVersion, stamp
from zellige_lightning.errors import DataError, PlanningError, ZelligeError
from zellige_lightning.fingerprint import (
    NO_REPORT,
    Agreed,
    placement_report,
    reading_plan,
    report_of,
    require_one_placement,
    require_one_plan,
)
from zellige_lightning.loader import GlobalBatchLoader
from zellige_lightning.placement import GlobalBatch, Plan
from zellige_lightning.planner import Planner
from zellige_lightning.planner.deferral import Deferred, carry, withhold
from zellige_lightning.planner.precedent import Precedent
from zellige_lightning.sources import TokenSource

Result = TypeVar("Result")


@dataclass
class PlannedStep:
    """A global batch that is planned and read.

    Args:
        batch: the whole global batch.
        waves: its planned parts, trained one after the other; one where everything fits at once.
        prepare_ms: agreement, solving, sharing and reading together.
        exposed_ms: how long training waited for it; set when it is taken.
        stop: some rank asked to stop before this batch.
        opens_window: whether an optimizer step begins with this batch; set when it is taken.
        hit_rate: share of batches so far whose plan came from the cache, 0 to 1.
        deferred: (key, bucket) of what waits for the next batch (`planner.defer`).
        agreed: plan and schedule of each wave, as all ranks compared them.
        expectation: what the profile expects of it; None where prices are not corrected.
        precedent: where it was placed, for the plan of the next batch.
    """

    batch: GlobalBatch
    waves: list[RankBatch]
    prepare_ms: float = 0.0
    stop: bool = False
    exposed_ms: float = 0.0
    opens_window: bool = True
    hit_rate: float = 0.0
    deferred: tuple[Deferred, ...] = ()
    agreed: tuple[Agreed, ...] = ()
    expectation: Expectation | None = None
    precedent: Precedent = field(default_factory=Precedent)


class StepPreparer:
    """Turns a `GlobalBatch` into this rank's `PlannedStep`. A collective of all ranks.

    Errors are agreed: whatever fails on one rank while planning or reading is raised on all, before the step.

    Args:
        apart: make every wave a batch of its own, for means that are not added up over waves.

    Attributes:
        deferred: (key, bucket) of what waits for the next batch; a resumed run sets it before its first.
        precedent: where the last batch was placed; likewise.
    """

    def __init__(
        self,
        agreement: Agreement,
        planner: Planner,
        stop_requested: Callable[[], bool],
        prices: OnlinePrices,
        apart: bool = False,
    ) -> None:
        self._agreement, self._planner, self._stop_requested = agreement, planner, stop_requested
        self._prices, self._apart = prices, apart
        self.deferred: tuple[Deferred, ...] = ()
        self.precedent = Precedent()

    def prepare(self, loader: GlobalBatchLoader, batch: GlobalBatch, accumulation: int) -> PlannedStep:
        """Agree on the batch, plan it on rank 0, share the plans, read this rank's tokens.

        Raises:
            DataError: ranks that drew different batches, or a sample that cannot be read.
            PlanningError: no placement; also for whatever else the planner raises.
            EngineError: a rank that holds another plan than the others, or a schedule that is not its plan's.
        """
        began = time.perf_counter()
        batch = carry(loader.drawn(batch, accumulation, self._agreement), self.deferred)
        version = self._prices.at(batch.step)
        mine = [batch.digest, stamp(version, self.precedent), int(self._stop_requested())]
        reports = self._agreement.gather(mine)
        if (error := _disagreement(reports)) is not None:
            error.step, error.agreed = batch.step, True
            raise error
        text = self._agreement.on_first(lambda: self._solve(batch, version))
        step = self._read_together(loader, batch, text, accumulation)
        self.deferred = step.deferred
        if self._prices.corrects:
            placed = [(wave.global_batch, wave.plan) for wave in step.waves]
            step.expectation = self._prices.expect(batch.step, placed)
            step.precedent = self.precedent = Precedent.of(placed)
        step.prepare_ms = 1e3 * (time.perf_counter() - began)
        step.stop = any(stop for *_, stop in reports)
        return step

    def _solve(self, batch: GlobalBatch, version: PriceVersion) -> str:
        """What rank 0 found, as JSON for all."""
        try:
            self._planner.use(version.table, version.correction, self.precedent)
            planned = self._planner.plan_ladder(batch, [key for key, _ in self.deferred])
        except ZelligeError as error:
            error.step = batch.step
            raise
        except Exception as error:
            raise PlanningError(
                f"the planner failed: {type(error).__name__}: {error}",
                fix="report this with the batch that caused it, or try another planner",
                step=batch.step,
            ) from error
        return json.dumps(
            {
                "waves": [[wave.members, wave.plan.to_json()] for wave in planned.waves],
                "waiting": planned.waiting,
                "report": planned.report,
                "hit_rate": self._planner.hit_rate,
            }
        )

    def _read_together(
        self, loader: GlobalBatchLoader, batch: GlobalBatch, text: str, accumulation: int
    ) -> PlannedStep:
        """This rank's part of what rank 0 planned, once all have read theirs and hold the same plan."""
        source = loader.routed(lambda: self._placed_alike(batch, text), self._agreement)
        step, reports = self._reported(
            lambda: self._read(loader, source, batch, text, accumulation),
            lambda step: report_of(batch.step, step.waves, self._agreement.rank),
        )
        require_one_plan(self._agreement, batch.step, reports, step.waves)
        step.agreed = tuple((wave.plan, wave.schedule) for wave in step.waves)
        return step

    def _placed_alike(self, batch: GlobalBatch, text: str) -> list[tuple[GlobalBatch, Plan]]:
        """What rank 0 planned, once all ranks hold the same, for samples that plans send from rank to rank:
        these are exchanged before anything is read. A collective."""

        def placed() -> list[tuple[GlobalBatch, Plan]]:
            with reading_plan(batch.step):
                return _placed(batch, json.loads(text))

        parts, reports = self._reported(placed, lambda parts: placement_report(batch.step, parts))
        require_one_placement(self._agreement, batch.step, reports, parts)
        return parts

    def _reported(
        self, work: Callable[[], Result], report_of_it: Callable[[Result], Rows[int]]
    ) -> tuple[Result, list[list[int]]]:
        """What `work` returns, and what every rank reports of its own; the same error on all where it fails
        on any. A collective."""
        error: Exception | None = None
        report: Rows[int] = NO_REPORT
        try:
            result = work()
            report = report_of_it(result)
        except Exception as caught:
            error = caught
        reports = self._agreement.raise_together(error, report)
        return result, reports

    def _read(
        self,
        loader: GlobalBatchLoader,
        source: TokenSource,
        batch: GlobalBatch,
        text: str,
        accumulation: int,
    ) -> PlannedStep:
        try:
            shared = json.loads(text)
            with reading_plan(batch.step):
                waves = [
                    materialize(
                        part.alone() if self._apart else part,
                        plan,
                        self._agreement.rank,
                        source,
                        accumulation=accumulation,
                        loss_reduction=loader.loss_reduction,
                        pad=True,
                    )
                    for part, plan in _placed(batch, shared)
                ]
            batch, deferred = withhold(batch, shared["waiting"])
            if shared["report"]:
                rank_zero_info(shared["report"])
            return PlannedStep(batch, waves, hit_rate=shared["hit_rate"], deferred=deferred)
        except ZelligeError as error:
            error.step = batch.step
            raise
        except Exception as error:
            raise DataError(
                f"reading failed: {type(error).__name__}: {error}",
                fix="see the traceback of that rank",
                step=batch.step,
            ) from error


def _disagreement(reports: list[list[int]]) -> ZelligeError | None:
    """What the ranks differ in before a step, if anything."""
    batches, prices, _ = zip(*reports, strict=True)
    if len(set(batches)) > 1:
        return DataError(
            f"the ranks drew different global batches: digests {list(batches)}",
            fix="give every rank the same seed, sample list and settings",
        )
    if len(set(prices)) > 1:
        return PlanningError(
            f"the ranks hold different prices or previous plans: digests {list(prices)}",
            fix="resume all ranks from the same checkpoint, or set planner.online=off",
        )
    return None


def _placed(batch: GlobalBatch, shared: dict[str, Any]) -> list[tuple[GlobalBatch, Plan]]:
    """The parts of a batch with their plans, as rank 0 told them."""
    trained, _ = withhold(batch, shared["waiting"])
    return [(trained.part(tuple(members)), Plan.from_json(plan)) for members, plan in shared["waves"]]


class PendingStep:
    """What the loader yields: a step that may still be in preparation. Not a dataclass: a half-precision
    plugin would walk into its fields.

    Args:
        opens_window: whether an optimizer step begins with this batch.
    """

    def __init__(self, batch: GlobalBatch, future: Future[PlannedStep], opens_window: bool) -> None:
        self.batch, self.opens_window, self._future = batch, opens_window, future

    def wait(self) -> None:
        """Until it is ready, or failed."""
        wait([self._future])

    def take(self) -> PlannedStep:
        """Wait until it is ready; says how long that took."""
        began = time.perf_counter()
        step = self._future.result()
        step.exposed_ms = 1e3 * (time.perf_counter() - began)
        step.opens_window = self.opens_window
        return step


class LookaheadLoader:
    """The training loader that Lightning sees: sized, stateful, the same on every rank.

    Its state counts batches that were trained, not those that were handed out or are being prepared, and
    is global: epoch and position, never anything of one rank.

    Args:
        loader: yields the global batches of an epoch.
        prepare: (global batch, accumulation) -> planned step; runs in the background thread.
        window: global batches per optimizer step in an epoch.
        limit: batches of an epoch that the trainer will use.
        processed: batches of the current epoch that the trainer has trained.
        resume: the position to go on from, asked at the first batch; None to start an epoch.
        before_first: runs in the main thread before the first batch is prepared (profiling).
        depth: batches that are prepared ahead.
        fixed_epoch: the epoch to repeat, where the trainer overfits some batches; else None.
    """

    def __init__(
        self,
        loader: GlobalBatchLoader,
        prepare: Callable[[GlobalBatch, int], PlannedStep],
        *,
        window: Callable[[int], int],
        limit: Callable[[], int],
        processed: Callable[[], int],
        resume: Callable[[], dict[str, int] | None],
        before_first: Callable[[], None],
        depth: int = 1,
        fixed_epoch: int | None = None,
    ) -> None:
        self.loader = loader
        self.sampler = self  # Lightning tells the epoch to `loader.sampler.set_epoch`
        self._prepare, self._window, self._limit, self._processed = prepare, window, limit, processed
        self._resume, self._before_first, self._depth = resume, before_first, depth
        self._fixed_epoch = fixed_epoch
        self._background: Background | None = None
        self._pending: dict[tuple[int, int], PendingStep] = {}
        self._epoch = self._delivered = 0
        self._epochs: dict[int, list[GlobalBatch]] = {}
        self.next_step = 0  # number of the first global batch that has not been asked for

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._delivered = epoch, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "delivered": min(self._delivered, self._processed())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only foreign states come this way, since ours are kept apart (`position`): there is nothing to
        go on from."""
        rank_zero_warn(
            f"the checkpoint's position {sorted(state)} is of another dataloader:"
            " the epoch starts from its first batch"
        )

    def __iter__(self) -> Iterator[PendingStep]:
        # A generator: nothing starts before the first `next`, since Lightning also calls iter() only to look.
        self._before_first()
        position = self._resume()
        if position is not None and position["epoch"] == self._epoch and not self._delivered:
            self._delivered = int(position["delivered"])
        epoch = self._epoch
        for index in range(self._delivered, len(self._batches(epoch))):
            pending = self._ask(epoch, index)
            for ahead in range(1, self._depth + 1):
                self._ask_ahead(epoch, index + ahead)
            self._pending.pop((epoch, index))
            self._delivered = index + 1
            yield pending

    def close(self, timeout_s: float | None = None) -> None:
        """End the background thread. What is in preparation is finished first, on all ranks alike.

        Args:
            timeout_s: wait no longer than that, where other ranks may never finish it.
        """
        if self._background is not None:
            self._background.close(timeout_s)
            self._background = None
        self._pending.clear()

    def settle(self) -> None:
        """Wait until nothing is in preparation. Whatever failed there shows when it is taken."""
        for pending in self._pending.values():
            pending.wait()

    def _ask(self, epoch: int, index: int) -> PendingStep:
        """The step at that position, handed to the background if it was not yet."""
        if (epoch, index) not in self._pending:
            if self._background is None:
                self._background = Background("zellige-lookahead")
            batch, window = self._batches(epoch)[index], self._window(epoch)
            future = self._background.submit(lambda: self._prepare(batch, window))
            self._pending[epoch, index] = PendingStep(batch, future, index % window == 0)
            self.next_step = max(self.next_step, batch.step + 1)
        return self._pending[epoch, index]

    def _ask_ahead(self, epoch: int, index: int) -> None:
        size = len(self._batches(epoch))
        if index < size:
            self._ask(epoch, index)
        elif index - size < size:
            self._ask(epoch + 1, index - size)

    def _batches(self, epoch: int) -> list[GlobalBatch]:
        if epoch not in self._epochs:
            self._epochs = {e: batches for e, batches in self._epochs.items() if e == epoch - 1}
            source_epoch = epoch if self._fixed_epoch is None else self._fixed_epoch
            self._epochs[epoch] = self.loader.epoch_batches(source_epoch, self._window(epoch), self._limit())
        return self._epochs[epoch]
