"""Data parallelism in which every sequence has its own placement, whatever keeps the parameters.

`ZelligeStrategy` (`strategy.py`) keeps all parameters on every rank, `ZelligeFSDP2Strategy` (`fsdp2.py`) a
shard. What they share owns what is shared by the ranks: the process groups, the agreement before each step,
the plan's way to everybody, and what happens when a rank fails. What is computed lives below (`planner`,
`engine`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from zellige_lightning.accumulation import window_in
from zellige_lightning.batch import RankBatch
from zellige_lightning.checkpoint_io import DurableCheckpointIO
from zellige_lightning.correction import OnlinePrices, observation_of, precedent_in, saved
from zellige_lightning.datamodule import ZelligeDataModule
from zellige_lightning.engine_config import EngineConfig
from zellige_lightning.errors import ConfigError
from zellige_lightning.evaluation import PlannedEvaluationLoader
from zellige_lightning.failures import connections
from zellige_lightning.guard import launcher_for
from zellige_lightning.hydra_settings import settings_from_hydra
from zellige_lightning.loader import GlobalBatchLoader
from zellige_lightning.lookahead import LookaheadLoader, PendingStep, PlannedStep
from zellige_lightning.mixin import CoalescedAttentionMixin
from zellige_lightning.monitor import MakespanMonitor
from zellige_lightning.placement import GlobalBatch
from zellige_lightning.planner import PlannerConfig, ProfileTable
from zellige_lightning.planner.deferral import Deferred
from zellige_lightning.planner.precedent import Precedent
from zellige_lightning.position import budget_in, deferred_in, position_in, prices_in, set_apart
from zellige_lightning.preemption import Preemption
from zellige_lightning.preparation import Job, prepare_planner
from zellige_lightning.profiler import HardwareProfiler, ProfilerConfig
from zellige_lightning.report.records import StepRecord
from zellige_lightning.services import Services
from zellige_lightning.sharding import without_moving
from zellige_lightning.timing import StepTimer, record_of
from zellige_lightning.trial import TrialStep
from zellige_lightning.waves import release_gradients, train_waves

if TYPE_CHECKING:  # what all Lightning strategies with several processes share has no class of its own
    _Processes = DDPStrategy
else:
    _Processes = ParallelStrategy


class PlacingStrategy(_Processes):
    """Places each sequence of a global batch on ranks of its own choice. Goes before a strategy of Lightning,
    which says how parameters are kept, among the bases.

    Args:
        planner: settings as `PlannerConfig`; None takes the `planner` node of the running Hydra application.
        memory_cap_gib: GiB that sequences may take on one rank; overrides `planner.memory_cap_gib`.
        engine: settings as `EngineConfig`; None as for `planner`.
        profiler: settings as `ProfilerConfig`; None as for `planner`.
        lookahead: global batches that are planned and read ahead.
        self_check: compare whole and split on a tiny input before anything is split.
        base: arguments of Lightning's strategy; `timeout` is that of every process group.

    Raises:
        ConfigError: unknown or contradicting settings.
    """

    def __init__(
        self,
        *,
        planner: PlannerConfig | Mapping[str, Any] | None = None,
        memory_cap_gib: float | None = None,
        engine: Mapping[str, Any] | None = None,
        profiler: Mapping[str, Any] | None = None,
        lookahead: int = 1,
        self_check: bool = True,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        config = PlannerConfig.of(planner if planner is not None else settings_from_hydra("planner"))
        if memory_cap_gib is not None:
            config = replace(config, memory_cap_gib=memory_cap_gib)
        if not isinstance(lookahead, int) or lookahead < 1:
            raise ConfigError(f"lookahead={lookahead!r}", fix="plan at least one global batch ahead")
        self.planner_config = config
        self.engine_config = EngineConfig.of(engine if engine is not None else settings_from_hydra("engine"))
        self.profiler_config = ProfilerConfig.of(
            profiler if profiler is not None else settings_from_hydra("profiler")
        )
        self.planned_step: PlannedStep | None = None
        self.profile: ProfileTable | None = None
        self._lookahead, self._self_check = lookahead, self_check
        self._phase, self._warned_unplanned = "set-up", False
        self._preemption: Preemption | None = None
        self._services: Services | None = None
        self._loaders: list[LookaheadLoader] = []
        self._position: dict[str, int] | None = None
        self._deferred: tuple[Deferred, ...] = ()
        self._precedent, self._learnt, self._profile_wanted = Precedent(), dict[str, Any](), False
        self._alone = False  # after a failure inside a step nobody answers any more
        self._timer = StepTimer()

    # ---- set-up --------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = launcher_for(self, self._start_method)

    def setup_environment(self) -> None:
        with connections.recorded():
            super().setup_environment()
        if self.root_device.type == "mps":
            raise ConfigError("no collectives on MPS", fix='use accelerator="cpu", or CUDA')
        if self._services is None:
            with connections.recorded():
                assert self._timeout is not None
                self._services = Services(self._timeout, self.root_device, self.engine_config)

    def connect(self, model: LightningModule) -> None:
        """Attach the callbacks that the strategy needs, unless the user brought their own."""
        super().connect(model)
        trainer: Any = model.trainer
        callbacks = trainer.callbacks
        for kind, make in ((HardwareProfiler, HardwareProfiler), (MakespanMonitor, MakespanMonitor)):
            if not any(isinstance(callback, kind) for callback in callbacks):
                callbacks.append(make())
        own = next(callback for callback in callbacks if isinstance(callback, HardwareProfiler))
        if own.config != ProfilerConfig():
            self.profiler_config = own.config
        trainer.callbacks = trainer._callback_connector._reorder_callbacks(callbacks)

    def setup(self, trainer: Trainer) -> None:
        self._preemption, self._warned_unplanned = Preemption(trainer), False
        super().setup(trainer)
        module = self.lightning_module
        if isinstance(module, CoalescedAttentionMixin):
            module.route_attention(self.services.router)

    @property
    def preemption(self) -> Preemption:
        assert self._preemption is not None, "the strategy is not set up"
        return self._preemption

    @property
    def services(self) -> Services:
        assert self._services is not None, "the strategy is not set up"
        return self._services

    def process_dataloader(self, dataloader: Any) -> Any:
        """A planned loader gets its look-ahead; any other one trains whole, as plain data parallelism."""
        if isinstance(dataloader, GlobalBatchLoader):
            return self._look_ahead(dataloader)
        if isinstance(dataloader, PlannedEvaluationLoader):
            dataloader.plan = self.plan_evaluation
            return dataloader
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        training = trainer is not None and trainer.state.fn == TrainerFn.FITTING and trainer.training
        if training and not self._warned_unplanned:
            self._warned_unplanned = True
            rank_zero_warn(
                "this dataloader is not planned: every rank trains its own whole samples, as under plain DDP."
                " Wrap its DataModule in ZelligeDataModule to place sequences."
            )
        return super().process_dataloader(dataloader)

    def _look_ahead(self, loader: GlobalBatchLoader) -> LookaheadLoader:
        trainer = self._trainer
        for old in self._loaders:
            old.close()
        if trainer.lightning_module.automatic_optimization is False:
            raise ConfigError(
                "manual optimization under the zellige strategy",
                fix="use automatic optimization: the loss weights follow accumulate_grad_batches",
            )
        ahead = LookaheadLoader(
            loader,
            lambda batch, accumulation: self.services.preparer.prepare(loader, batch, accumulation),
            window=lambda epoch: window_in(trainer, epoch),
            limit=lambda: int(min(trainer.num_training_batches, len(loader))),
            processed=lambda: trainer.fit_loop.epoch_loop.batch_progress.current.processed,
            resume=self._go_on,
            before_first=lambda: self.prepare_planning(loader),
            depth=self._lookahead,
            fixed_epoch=0 if trainer.overfit_batches else None,
        )
        self._loaders = [ahead]
        return ahead

    # ---- planning ------------------------------------------------------------------------------------------

    def prepare_planning(self, loader: GlobalBatchLoader | None = None) -> None:
        """See `prepare_planner`. Does nothing the second time, or where nothing is planned. Draws no random
        number of the run and leaves parameters and buffers alone."""
        services, module = self.services, self.lightning_module
        assert module is not None
        if loader is None and isinstance(self._trainer.datamodule, ZelligeDataModule):
            loader = self._trainer.datamodule.training_loader()
        if services.preparer_ready or loader is None:
            return
        began = time.perf_counter()
        self._phase = "profiling"
        job = Job(
            module,
            loader,
            TrialStep(self.precision_plugin, loader.source),
            self.planner_config,
            self.profiler_config.shown(self._trainer.progress_bar_callback is not None),
            str(self._trainer.precision),
            self.root_device,
            self.num_processes,
            self._self_check,
            self._kept_gradient_bytes(),
        )
        with isolate_rng():
            self.profile, planner = prepare_planner(job, services)
        warmup = self.planner_config.online_warmup if self.planner_config.adapts else None
        topology = services.topology(self.planner_config.ranks_per_node)
        prices = OnlinePrices(self.profile, topology, services.agreement, warmup)
        services.plan_with(planner, lambda: self.preemption.requested, prices)
        rank_zero_info(f"zellige: ready in {time.perf_counter() - began:.1f} s")

    def _kept_gradient_bytes(self) -> int:
        """Of gradients that outlive a backward besides those that the optimizer sees."""
        return 0

    def plan_evaluation(self, loader: GlobalBatchLoader, batch: GlobalBatch) -> list[RankBatch]:
        """This rank's part of each wave of a batch that is not trained on. A collective of the main thread.

        Raises:
            ZelligeError: planning or reading failed on some rank; the same error on all ranks.
        """
        self.prepare_planning()
        return self.services.evaluation_preparer.prepare(loader, batch, accumulation=1).waves

    def evaluate(self, method: str, batch: RankBatch, *args: Any) -> Any:
        """Call a method of the module with a batch of `plan_evaluation`, as a validation step is called."""
        with (
            self.precision_plugin.val_step_context(),
            self.services.attending(self.lightning_module, batch),
        ):
            result = self._call(method, batch, *args)
        self.services.stop_attending()
        return result

    def _call(self, method: str, *args: Any) -> Any:
        return getattr(self.lightning_module, method)(*args)

    def _go_on(self) -> dict[str, int] | None:
        """The position to go on from, and what waited there; None unless a checkpoint is being resumed."""
        if not self._trainer.fit_loop.restarting:
            return None
        self.services.preparer.deferred = self._deferred
        learnt, self._learnt = self._learnt, {}
        if reason := self.services.prices.restore(learnt):
            rank_zero_warn(f"zellige: {reason}")
        elif learnt:
            self.services.preparer.precedent = self._precedent = precedent_in(learnt)
        return self._position

    def take(self, pending: PendingStep) -> RankBatch:
        """The planned batch of this step; called from the data module's `on_before_batch_transfer`.

        Raises:
            SIGTERMException: some rank was asked to stop; on all ranks at the same step.
            ZelligeError: planning or reading failed on some rank; the same error on all ranks.
        """
        self._phase = "planning"
        step = pending.take()
        self.preemption.agreed |= step.stop
        if step.opens_window:
            self.preemption.stop_if_agreed()
        self.planned_step = step
        convert = self.precision_plugin.convert_input
        for wave in step.waves:
            wave.tokens, wave.context = convert(wave.tokens), convert(wave.context)
        return step.waves[0]

    # ---- the step ------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        opens_window = batch_idx % self._trainer.accumulate_grad_batches == 0
        if self.planned_step is None and self.world_size > 1 and opens_window:
            stops = self.services.agreement.gather([int(self.preemption.requested)])
            self.preemption.agreed |= any(stop for (stop,) in stops)
            self.preemption.stop_if_agreed()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch = _rank_batch(args, kwargs)
        if batch is None and self.planned_step is not None:  # a user's hook has put it into something else
            batch = self.planned_step.waves[0]
        self._phase = "training_step"
        self.services.begin_step(self.planned_step)
        self._timer.start(self.root_device)
        if self.planned_step is not None and len(self.planned_step.waves) > 1:
            return train_waves(self, self.planned_step, super().training_step, args, kwargs)
        with self.services.attending(self.lightning_module, batch):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating("validation_step", args, kwargs):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating("test_step", args, kwargs):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluating("predict_step", args, kwargs):
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluating(self, phase: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        self._phase = phase
        with self.services.attending(self.lightning_module, _rank_batch(args, kwargs)):
            yield
        self.services.stop_attending()

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        self._phase = "backward"
        release_gradients(self.lightning_module)
        self._timer.watch(args[0] if args else kwargs["closure_loss"])
        return super().backward(*args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._timer.stop()
        self.services.stop_attending()
        self._phase = "optimizer_step"

    def finish_step(self) -> StepRecord:
        """What the ranks measured of the planned step that just ended. A collective."""
        step = self.planned_step
        assert step is not None
        self.planned_step, self._deferred, self._precedent = None, step.deferred, step.precedent
        counted = self.services.engine.counters.to_integers()
        wanted = int(self._profile_wanted)
        reports = self.services.agreement.gather([wanted, *self._timer.read(), *counted])
        self._phase = "between steps"
        record = record_of(step, [report[1:] for report in reports])
        if step.expectation is not None:
            self._learn(step, record, [(wall, own) for _, wall, _, own, *_ in reports])
        if any(wanted for wanted, *_ in reports):
            self._profile_again()
        return record

    def _learn(self, step: PlannedStep, record: StepRecord, times: list[tuple[int, int]]) -> None:
        """Correct prices by what a step took, see `OnlinePrices`. A collective."""
        assert step.expectation is not None
        observed = observation_of(
            record.step, step.expectation, times, record.predicted_us, record.measured_us
        )
        for line in self.services.prices.observe(observed, self._loaders[0].next_step):
            rank_zero_info(f"zellige: {line}")

    def request_profile(self) -> None:
        """Have prices measured again after this step, such as after a drift alarm. Any rank may ask."""
        self._profile_wanted = True

    def _profile_again(self) -> None:
        """On copies of the model, as at the start of the fit, while nothing is planned. A collective."""
        self._phase, self._profile_wanted = "profiling", False
        self._loaders[0].settle()
        assert self.services.measure_again is not None
        with isolate_rng():
            self.profile = self.services.measure_again()
        self.services.prices.remeasured(self.profile, self._loaders[0].next_step)
        rank_zero_info(f"zellige: prices of step {self._loaders[0].next_step} on are measured again")
        self._phase = "between steps"

    # ---- checkpoints ---------------------------------------------------------------------------------------

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin, or one that never leaves half a file."""
        if self._checkpoint_io is None:
            self._checkpoint_io = DurableCheckpointIO()
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: CheckpointIO | None) -> None:
        self._checkpoint_io = plugin

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        ready = self._services is not None and self._services.preparer_ready
        prices = saved(self.services.prices, self._precedent) if ready else self._learnt
        data = self._trainer.datamodule
        budget = data.tokens_per_batch if isinstance(data, ZelligeDataModule) else None
        set_apart(checkpoint, self._deferred, prices, budget)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        self._position, self._deferred = position_in(checkpoint), deferred_in(checkpoint)
        self._learnt = prices_in(checkpoint)
        self._keep_budget(budget_in(checkpoint))
        return checkpoint

    def _keep_budget(self, tokens_per_batch: int | None) -> None:
        data, loop = self._trainer.datamodule, self._trainer.fit_loop
        fitting = self._trainer.state.fn == TrainerFn.FITTING
        if tokens_per_batch is None or not fitting or not isinstance(data, ZelligeDataModule):
            return
        if tokens_per_batch != data.tokens_per_batch:
            # A scheduler that asked for the number of steps has made one already.
            loop._combined_loader = None
        data.go_on_with(tokens_per_batch)

    # ---- stopping and failing ------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        super().on_train_start()
        self.preemption.watch()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._trainer.sanity_checking:
            self.preemption.watch()

    def resolve_failure(self, error: BaseException) -> BaseException:
        """What this rank raises for `error`, see `FailureBoard`."""
        if self._services is None:
            return error
        step = self.planned_step.batch.step if self.planned_step is not None else None
        resolved = self._services.failures.resolve(error, self._phase, step)
        self._alone = (
            self.world_size > 1 and isinstance(error, Exception) and not getattr(error, "agreed", False)
        )
        return resolved

    # What saves a checkpoint on an exception must not wait for, or be hidden by, ranks that are gone.

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._alone:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._alone else super().broadcast(obj, src)

    def reduce(self, *args: Any, **kwargs: Any) -> Any:
        with self._timer.waiting():
            return super().reduce(*args, **kwargs)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._alone else super().reduce_boolean_decision(decision, all=all)

    def on_exception(self, exception: BaseException) -> None:
        together = isinstance(exception, SIGTERMException) or getattr(exception, "agreed", False)
        for loader in self._loaders:
            loader.close(timeout_s=None if together else 0.0)
        super().on_exception(exception)

    def teardown(self) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders = []
        self.planned_step = None
        if self._services is not None:
            self._services.close()
            self._services = None
        with without_moving(self.lightning_module):
            super().teardown()

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


def _rank_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> RankBatch | None:
    return next((a for a in (*args, *kwargs.values()) if isinstance(a, RankBatch)), None)
