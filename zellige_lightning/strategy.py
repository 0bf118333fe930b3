"""`Trainer(strategy="zellige")`: data parallelism in which every sequence has its own placement.

The strategy owns what is shared by the ranks: the process groups, the agreement before each step, the plan's way to
everybody, and what happens when a rank fails. What is computed lives below (`planner`, `engine`).
"""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zellige_lightning.agreement import Agreement
from zellige_lightning.batch import RankBatch
from zellige_lightning.datamodule import ZelligeDataModule
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine, ProcessGroupCache
from zellige_lightning.engine.routing import engine_of_step
from zellige_lightning.errors import ConfigError, EngineError
from zellige_lightning.failures import FailureBoard, connections
from zellige_lightning.guard import launcher_for
from zellige_lightning.hydra_settings import settings_from_hydra
from zellige_lightning.loader import GlobalBatchLoader
from zellige_lightning.lookahead import LookaheadLoader, PendingStep, PlannedStep, StepPreparer
from zellige_lightning.mixin import CoalescedAttentionMixin
from zellige_lightning.monitor import MakespanMonitor
from zellige_lightning.placement import Topology
from zellige_lightning.planner import (
    MemoryModel,
    Planner,
    PlannerConfig,
    ProfileTable,
    legal_configs,
    legal_family,
    make_planner,
)
from zellige_lightning.profiler import (
    HardwareProfiler,
    Measurement,
    ProfilerConfig,
    fingerprint_of,
    load_or_measure,
    measure_table,
)
from zellige_lightning.registration import register
from zellige_lightning.report.records import StepRecord
from zellige_lightning.trace import attention_shape, check_locality, copy_module, measure_geometry

# The name of DDP's switch for sending rank 0's buffers around before every forward; it was renamed in torch 2.13.
_NO_BUFFER_SYNC = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)
_runs = itertools.count()  # the same on all ranks, since all make the same strategies


class ZelligeStrategy(DDPStrategy):
    """Places each sequence of a global batch on ranks of its own choice.

    Args:
        planner: settings as `PlannerConfig`; None takes the `planner` node of the running Hydra application, if any.
        memory_cap_gib: GiB that sequences may take on one rank; overrides `planner.memory_cap_gib`.
        engine: settings as `EngineConfig`; None as for `planner`.
        profiler: settings as `ProfilerConfig`; None as for `planner`.
        lookahead: global batches that are planned and read ahead.
        self_check: compare whole and split on a tiny input before anything is split.
        base: arguments of `DDPStrategy`; `timeout` is that of every process group.

    Raises:
        ConfigError: unknown or contradicting settings.
    """

    strategy_name = "zellige"

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
        base.setdefault("find_unused_parameters", False)
        base.setdefault("gradient_as_bucket_view", True)
        base.setdefault(_NO_BUFFER_SYNC, False)
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
        self._phase, self._stop_requested = "set-up", False
        self._services: _Services | None = None
        self._loaders: list[LookaheadLoader] = []
        self._timer = StepTimer()

    # ---- set-up ---------------------------------------------------------------------------------------------

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
                self._services = _Services(self)

    def connect(self, model: LightningModule) -> None:
        """Attach the callbacks that the strategy needs, unless the user brought their own."""
        super().connect(model)
        callbacks = model.trainer.callbacks
        for kind, make in ((HardwareProfiler, HardwareProfiler), (MakespanMonitor, MakespanMonitor)):
            if not any(isinstance(callback, kind) for callback in callbacks):
                callbacks.append(make())
        own = next(callback for callback in callbacks if isinstance(callback, HardwareProfiler))
        if own.config != ProfilerConfig():
            self.profiler_config = own.config
        model.trainer.callbacks = model.trainer._callback_connector._reorder_callbacks(callbacks)

    def setup(self, trainer: Trainer) -> None:
        if self._ddp_kwargs.get("static_graph") and trainer.accumulate_grad_batches > 1:
            raise ConfigError(
                "static_graph=True with accumulate_grad_batches > 1 loses gradients",
                fix="leave static_graph off; placement needs no static graph",
            )
        super().setup(trainer)
        module = self.lightning_module
        if isinstance(module, CoalescedAttentionMixin) and not self.services.routed:
            module.route_attention(self.services.router)
            self.services.routed = True

    @property
    def services(self) -> _Services:
        assert self._services is not None, "the strategy is not set up"
        return self._services

    def process_dataloader(self, dataloader: Any) -> Any:
        """A planned loader gets its look-ahead; any other one trains whole, as plain data parallelism."""
        if isinstance(dataloader, GlobalBatchLoader):
            return self._look_ahead(dataloader)
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING and trainer.training:
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
            lambda batch: self.services.preparer.prepare(loader, batch, trainer.accumulate_grad_batches),
            window=lambda: trainer.accumulate_grad_batches,
            limit=lambda: int(min(trainer.num_training_batches, len(loader))),
            before_first=lambda: self.prepare_planning(loader),
            depth=self._lookahead,
            fixed_epoch=0 if trainer.overfit_batches else None,
        )
        self._loaders = [ahead]
        return ahead

    # ---- planning -------------------------------------------------------------------------------------------

    def prepare_planning(self, loader: GlobalBatchLoader | None = None) -> None:
        """Check the model, make the process groups, load or measure the profile, make the planner. A collective;
        does nothing the second time, or where nothing is planned.

        Raises:
            EngineError: a model whose tokens mix outside the engine, or that calls no attention.
            ProfileError: no usable price.
            ConfigError: a family with too many process groups.
        """
        services, module = self.services, self.lightning_module
        assert module is not None
        if loader is None and isinstance(self._trainer.datamodule, ZelligeDataModule):
            loader = self._trainer.datamodule.training_loader()
        if services.preparer_ready or loader is None:
            return
        began = time.perf_counter()
        self._phase = "profiling"
        shape = services.agreement.together(lambda: self._trace(module, loader))
        world = services.agreement.world_size
        config = self.planner_config
        degrees = planned_degrees(world, config.max_degree)
        configs = tuple(c for c in legal_configs(shape.num_heads, world) if c.degree in degrees)
        topology = services.topology()
        with connections.recorded():
            services.groups.prepare(legal_family(topology, config.family, degrees))
        geometry = services.agreement.together(
            lambda: measure_geometry(module, services.router, loader.source, shape)
        )
        memory = MemoryModel(services.largest(geometry))
        cap_mib = self.memory_cap_mib(module)
        buckets = loader.buckets
        fingerprint = fingerprint_of(
            module, buckets, configs, topology, str(self._trainer.precision), self.root_device
        )
        table = load_or_measure(
            services.agreement,
            self.profiler_config.file(fingerprint),
            fingerprint,
            lambda: measure_table(
                Measurement(
                    module, services.engine, services.router, services.agreement, loader.source, self.profiler_config
                ),
                module,
                buckets,
                configs,
                topology,
                memory,
                cap_mib,
                fingerprint,
            ),
            rank_zero_info,
        )
        self.profile = table
        services.plan_with(make_planner(config, table, memory, topology, shape.num_heads, cap_mib))
        rank_zero_info(
            f"zellige: {len(buckets)} buckets, {len(configs)} configurations, {len(services.groups)} process groups,"
            f" cap {cap_mib / 1024:.2f} GiB, ready in {time.perf_counter() - began:.1f} s"
        )

    def _trace(self, module: LightningModule, loader: GlobalBatchLoader) -> Any:
        if not isinstance(module, CoalescedAttentionMixin):
            raise EngineError(
                f"{type(module).__name__} is to train on planned batches and has no CoalescedAttentionMixin",
                fix="class Model(CoalescedAttentionMixin, LightningModule), with `coalesced_attention` patterns",
            )
        router = self.services.router
        clone = copy_module(module, 1)
        with self.precision_plugin.train_step_context():
            shape = attention_shape(clone, router, loader.source)
            if self._self_check and self.world_size > 1 and self.planner_config.max_degree != 1:
                check_locality(clone, router, loader.source)
        return shape

    def memory_cap_mib(self, module: LightningModule) -> int:
        """M_cap = M_usable - M_base (paper, Sec. IV-B), or the user's `memory_cap_gib`; the smallest of all ranks.

        M_base holds parameters, gradients and optimizer state. Gradients stay alive during the next forward.
        """
        if self.planner_config.memory_cap_gib is not None:
            return max(1, int(self.planner_config.memory_cap_gib * 1024))
        trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        if self.root_device.type == "cuda":
            usable = 0.94 * torch.cuda.get_device_properties(self.root_device).total_memory
            base = torch.cuda.memory_allocated(self.root_device) + 3 * trained
        else:
            usable = 0.8 * _host_memory() / max(1, self.num_processes)
            base = 3.0 * trained
        mine = int((usable - base) / 2**20)
        smallest = min(cap for (cap,) in self.services.agreement.gather([mine]))
        if smallest < 1:
            raise ConfigError(
                f"parameters, gradients and optimizer state leave {smallest} MiB for sequences",
                fix="use a smaller model, a larger device, or sharded parameters",
            )
        return smallest

    def take(self, pending: PendingStep) -> RankBatch:
        """The planned batch of this step; called from the data module's `on_before_batch_transfer`.

        Raises:
            SIGTERMException: some rank was asked to stop; on all ranks at the same step.
            ZelligeError: planning or reading failed on some rank; the same error on all ranks.
        """
        self._phase = "planning"
        step = pending.take()
        if step.stop:
            self._trainer._signal_connector.received_sigterm = True
            raise SIGTERMException
        self.planned_step = step
        convert = self.precision_plugin.convert_input
        step.rank_batch.tokens = convert(step.rank_batch.tokens)
        step.rank_batch.context = convert(step.rank_batch.context)
        return step.rank_batch

    # ---- the step -------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch = next((a for a in (*args, *kwargs.values()) if isinstance(a, RankBatch)), None)
        self._phase = "training_step"
        self._timer.start(self.root_device)
        with self._attending(batch):
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
        batch = next((a for a in (*args, *kwargs.values()) if isinstance(a, RankBatch)), None)
        with self._attending(batch):
            yield

    @contextmanager
    def _attending(self, batch: RankBatch | None) -> Iterator[None]:
        """Answer attention by the engine, on from here: backward recomputes after the block has ended."""
        services, module = self.services, self.lightning_module
        planned = batch is not None and isinstance(module, CoalescedAttentionMixin)
        if planned:
            assert batch is not None
            services.engine.install(batch.schedule)
            services.router.attention = services.engine
        else:
            services.engine.uninstall()
            services.router.attention = None
        if isinstance(module, CoalescedAttentionMixin):
            module._planned_batch = batch if self._phase == "training_step" else None
        with engine_of_step(services.engine):
            yield

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        self._phase = "backward"
        return super().backward(*args, **kwargs)

    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._timer.stop()
        self._phase = "optimizer_step"

    def finish_step(self) -> StepRecord:
        """What the ranks measured of the planned step that just ended. A collective."""
        step = self.planned_step
        assert step is not None
        self.planned_step = None
        wall_us, busy_us = self._timer.read()
        reports = self.services.agreement.gather([wall_us, busy_us])
        busy = [b for _, b in reports]
        plan, batch = step.rank_batch.plan, step.rank_batch.global_batch
        self._phase = "between steps"
        return StepRecord(
            step=batch.step,
            batch=batch,
            plan=plan,
            predicted_us=plan.predicted_us,
            measured_us=max(1, max(w for w, _ in reports)),
            imbalance=plan.imbalance,
            measured_imbalance=max(busy) * len(busy) / max(1, sum(busy)),
            num_splits=plan.num_splits,
            solve_ms=step.prepare_ms,
            exposed_ms=step.exposed_ms,
        )

    # ---- stopping and failing -------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.world_size > 1:
            self._stop_requested = False
            signal.signal(signal.SIGTERM, self._request_stop)

    def _request_stop(self, signum: int, frame: Any) -> None:
        """Only set a flag: a collective inside a signal handler interleaves with the others and hangs. The flag
        travels with the next agreement, and all ranks stop before the same step."""
        if not self._stop_requested and self.launcher is not None:
            self.launcher.kill(signal.SIGTERM)
        self._stop_requested = True

    def resolve_failure(self, error: BaseException) -> BaseException:
        """What this rank raises for `error`, see `FailureBoard`."""
        if self._services is None:
            return error
        step = self.planned_step.rank_batch.global_batch.step if self.planned_step is not None else None
        return self._services.failures.resolve(error, self._phase, step)

    def on_exception(self, exception: BaseException) -> None:
        for loader in self._loaders:
            loader.close(timeout_s=0.0)
        super().on_exception(exception)

    def teardown(self) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders = []
        self.planned_step = None
        if self._services is not None:
            self._services.close()
            self._services = None
        module = self.lightning_module
        if isinstance(module, CoalescedAttentionMixin):
            module._planned_batch = None
        super().teardown()

    @property
    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the engine; keys of `engine.*` in the configuration.

    Args:
        max_schedules: schedules that are kept for backwards that come later than the next forward.
    """

    max_schedules: int = 256

    def __post_init__(self) -> None:
        if not isinstance(self.max_schedules, int) or self.max_schedules < 1:
            raise ConfigError(f"engine.max_schedules = {self.max_schedules!r}", fix="an integer >= 1")

    @classmethod
    def of(cls, settings: EngineConfig | Mapping[str, Any] | None) -> EngineConfig:
        """From what a user writes. Raises: ConfigError for unknown keys."""
        if settings is None or isinstance(settings, EngineConfig):
            return settings or cls()
        known = [f.name for f in fields(cls)]
        if unknown := sorted(set(map(str, settings)) - set(known)):
            raise ConfigError(f"unknown engine settings {unknown}", fix=f"known are {known}")
        return cls(**settings)


class _Services:
    """What lives as long as the process groups: made at set-up, so that the strategy itself can be pickled."""

    def __init__(self, strategy: ZelligeStrategy) -> None:
        timeout = strategy._timeout
        assert timeout is not None
        self.agreement = Agreement(timeout)
        self._background_agreement = Agreement(timeout)
        self.groups = ProcessGroupCache(timeout, strategy.root_device)
        groups = self.groups if self.agreement.world_size > 1 else None
        self.engine = CoalescedAttentionEngine(groups, strategy.engine_config.max_schedules)
        self.router = AttentionRouter()
        self.routed = False
        self.failures = FailureBoard(next(_runs))
        self._strategy = strategy
        self._preparer: StepPreparer | None = None

    @property
    def preparer_ready(self) -> bool:
        return self._preparer is not None

    @property
    def preparer(self) -> StepPreparer:
        assert self._preparer is not None, "planning is not prepared"
        return self._preparer

    def plan_with(self, planner: Planner) -> None:
        strategy = self._strategy
        self._preparer = StepPreparer(
            self._background_agreement, planner, lambda: strategy._stop_requested
        )

    def topology(self) -> Topology:
        """Ranks of one host are a node."""
        hosts = [self.agreement.share(socket.gethostname(), rank) for rank in range(self.agreement.world_size)]
        return Topology(tuple(sorted(set(hosts), key=hosts.index).index(host) for host in hosts))

    def largest(self, geometry: Any) -> Any:
        """The geometry with the largest memory coefficients of all ranks, so that all plan alike."""
        names = ("resident_bytes_per_token", "transient_bytes_per_token")
        rows = self.agreement.gather([getattr(geometry, name) for name in names])
        return replace(geometry, **{n: max(row[i] for row in rows) for i, n in enumerate(names)})

    def close(self) -> None:
        self.router.detach()
        self.engine.uninstall()
        self.groups.close()
        self.agreement.close()
        self._background_agreement.close()


def planned_degrees(world_size: int, max_degree: int | None = None) -> frozenset[int]:
    """Split degrees that are profiled and get process groups: divisors of N and powers of two up to N."""
    limit = min(world_size, max_degree or world_size)
    powers = {2**i for i in range(limit.bit_length())}
    return frozenset(d for d in range(1, limit + 1) if world_size % d == 0 or d in powers)


def _host_memory() -> int:
    """Bytes of memory of this host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class StepTimer:
    """Wall and busy time of forward and backward, microseconds. Busy leaves out waiting for other ranks where the
    device can tell: on CPU it is the thread's processor time, on CUDA the same as wall."""

    def __init__(self) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._began = self._ended = (0.0, 0.0)

    def start(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events[0].record()
        self._began = time.perf_counter(), time.thread_time()

    def stop(self) -> None:
        if self._events is not None:
            self._events[1].record()
        self._ended = time.perf_counter(), time.thread_time()

    def read(self) -> tuple[int, int]:
        if self._events is not None:
            self._events[1].synchronize()
            wall = 1e3 * self._events[0].elapsed_time(self._events[1])
            return int(wall), int(wall)
        wall, busy = (1e6 * (end - begin) for begin, end in zip(self._began, self._ended, strict=True))
        return int(wall), int(busy)


register()
