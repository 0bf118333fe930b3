"""What a strategy holds as long as its process groups live."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta

import torch
from lightning.pytorch import LightningModule

from zellige_lightning.agreement import Agreement
from zellige_lightning.batch import RankBatch
from zellige_lightning.correction import OnlinePrices
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine, ProcessGroupCache
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.engine.saving import SavePolicy
from zellige_lightning.engine_config import EngineConfig
from zellige_lightning.failures import FailureBoard
from zellige_lightning.fingerprint import Agreed, report_of, require_agreed, require_one_plan
from zellige_lightning.lookahead import PlannedStep, StepPreparer
from zellige_lightning.mixin import require_mixin
from zellige_lightning.placement import Topology
from zellige_lightning.placement.topology import RankSite, detect_topology, rank_site
from zellige_lightning.planner import ModelGeometry, Planner, ProfileTable
from zellige_lightning.step_trace import write_trace

_runs = itertools.count()  # the same on all ranks, since all make the same strategies


class Services:
    """Groups, engine and planner of a run: made at set-up, so that the strategy itself can be pickled.

    Args:
        timeout: of every process group.
        device: of this rank.
    """

    def __init__(self, timeout: timedelta, device: torch.device, engine_config: EngineConfig) -> None:
        self.agreement = Agreement(timeout)
        self._background_agreement = Agreement(timeout)
        self.groups = ProcessGroupCache(
            timeout, device, engine_config.transport, engine_config.max_communicators
        )
        groups = self.groups if self.agreement.world_size > 1 else None
        self.saving = SavePolicy(engine_config.save_attention)
        self.engine = CoalescedAttentionEngine(
            groups,
            engine_config.max_schedules,
            keep_when_compiled=engine_config.save_attention == "all",
            gather_chunks=engine_config.gather_chunks,
        )
        self.router = AttentionRouter()
        self.failures = FailureBoard(next(_runs))
        self.config, self._device = engine_config, device
        self._traces_left = engine_config.trace_steps if isinstance(engine_config.trace_steps, int) else 0
        self._preparer: StepPreparer | None = None
        self._agreed: list[Agreed] = []  # of the waves of the current step that have not begun
        self._prices: OnlinePrices | None = None
        self.measure_again: Callable[[], ProfileTable] | None = None
        self._evaluation_preparer: StepPreparer | None = None

    @property
    def preparer_ready(self) -> bool:
        return self._preparer is not None

    @property
    def preparer(self) -> StepPreparer:
        assert self._preparer is not None, "planning is not prepared"
        return self._preparer

    @property
    def evaluation_preparer(self) -> StepPreparer:
        """For the main thread, while the background thread may be preparing the next training step."""
        assert self._evaluation_preparer is not None, "planning is not prepared"
        return self._evaluation_preparer

    @property
    def prices(self) -> OnlinePrices:
        assert self._prices is not None, "planning is not prepared"
        return self._prices

    def plan_with(self, planner: Planner, stop_requested: Callable[[], bool], prices: OnlinePrices) -> None:
        """Plan with `planner` at `prices` from now on, in the background thread's own groups."""
        self._prices = prices
        self._preparer = StepPreparer(self._background_agreement, planner, stop_requested, prices)
        self._evaluation_preparer = StepPreparer(
            self.agreement, planner.for_evaluation(), lambda: False, prices.as_measured(), apart=True
        )

    def topology(self, ranks_per_node: int | None) -> Topology:
        """What the ranks see of their machines, see `detect_topology`."""
        mine = rank_site().to_text()
        texts = [self.agreement.share(mine, rank) for rank in range(self.agreement.world_size)]
        return detect_topology([RankSite.from_text(text) for text in texts], ranks_per_node)

    def largest(self, geometry: ModelGeometry) -> ModelGeometry:
        """The geometry with the largest memory coefficients of all ranks, so that all plan alike."""
        names = [f.name for f in fields(geometry) if f.name.endswith(("_token", "_sequence", "step_bytes"))]
        names.remove("exchange_bytes_per_token")
        configs = [config for config, _ in geometry.exchange_bytes_per_token]
        mine = [getattr(geometry, name) for name in names]
        mine += [size for _, size in geometry.exchange_bytes_per_token]
        most = [max(column) for column in zip(*self.agreement.gather(mine), strict=True)]
        exchanges = tuple(zip(configs, most[len(names) :], strict=True))
        largest = dict(zip(names, most[: len(names)], strict=True))
        return replace(geometry, **largest, exchange_bytes_per_token=exchanges)

    @contextmanager
    def attending(self, module: LightningModule | None, batch: RankBatch | None) -> Iterator[None]:
        """Answer the module's attention by the engine, on from here: backward recomputes after the block
        has ended.

        Args:
            batch: what the step is for; None leaves attention alone.

        Raises:
            EngineError: a planned batch for a module whose attention cannot be answered, or one that is not
                what the ranks agreed on.
        """
        if batch is None:
            self.stop_attending()
            yield
            return
        routed = require_mixin(module)
        if self._agreed:
            require_agreed(batch, self._agreed.pop(0), self.engine.observer.step)
        self.engine.install(batch.schedule, self._kept(batch))
        self.router.attention = self.engine
        routed._planned_batch = batch
        try:
            with engine_of_step(self.engine):
                yield
        finally:
            routed._planned_batch = None

    def _kept(self, batch: RankBatch) -> frozenset[int]:
        plan, lengths = batch.plan, [s.num_tokens for s in batch.global_batch.sequences]
        return self.saving.choose(plan.options, lengths, plan.memory_mib)

    def begin_step(self, step: PlannedStep | None) -> None:
        """Count from here on. A collective under `engine.debug`.

        Raises:
            EngineError: another plan on some rank, see `require_one_plan`.
        """
        observer = self.engine.observer
        observer.counters.reset()
        observer.step = step.batch.step if step is not None else None
        if step is None:
            return
        self._agreed = list(step.agreed)
        if self.config.debug:
            report = report_of(step.batch.step, step.waves, self.agreement.rank)
            require_one_plan(self.agreement, step.batch.step, self.agreement.gather(report), step.waves)
        if self._to_be_traced(step.batch.step):
            observer.timeline.start(step.batch.step, self._device)

    def _to_be_traced(self, step: int) -> bool:
        """The same on all ranks."""
        wanted = self.config.trace_steps
        if not isinstance(wanted, int):
            return step in wanted
        self._traces_left -= 1
        return self._traces_left >= 0

    def end_trace(self, folder: Callable[[], str]) -> str | None:
        """Write what was recorded of the step that just ended into `folder()`; the path. A collective."""
        timeline = self.engine.observer.timeline
        step = timeline.step
        return None if step is None else write_trace(self.agreement, timeline.stop(), step, folder())

    def stop_attending(self) -> None:
        """Leave attention alone: between steps the model may run on anything, such as a sample to look at."""
        self.engine.forget()
        self.router.attention = None
        self._agreed = []

    def close(self) -> None:
        """Leave the model as it was, copies of it included, and drop the groups."""
        self.stop_attending()
        self.router.detach()
        self.groups.close()
        self.agreement.close()
        self._background_agreement.close()
