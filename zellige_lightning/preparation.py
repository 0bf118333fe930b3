"""Everything between a set-up model and its first planned step: checks, process groups, profile, planner."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from zellige_lightning.engine import AttentionRouter
from zellige_lightning.engine.kernel_choice import choice_in_words, kernel_for, require_kernel
from zellige_lightning.errors import ConfigError
from zellige_lightning.failures import connections
from zellige_lightning.geometry import measure_geometry, recomputes_attention, saved_bytes_per_token
from zellige_lightning.loader import GlobalBatchLoader
from zellige_lightning.memory_budget import memory_budget
from zellige_lightning.mixin import require_mixin
from zellige_lightning.placement import ParallelConfig, Topology
from zellige_lightning.planner import (
    MemoryModel,
    Planner,
    PlannerConfig,
    ProfileTable,
    legal_configs,
    legal_family,
    make_planner,
)
from zellige_lightning.profile_cache import fingerprint_of, load_or_measure
from zellige_lightning.profile_runs import Measurement
from zellige_lightning.profiler import ProfilerConfig, measure_table
from zellige_lightning.services import Services
from zellige_lightning.trace import (
    AttentionShape,
    attention_shape,
    check_copy,
    check_locality,
    check_packing,
)
from zellige_lightning.trial import TrialStep, copy_module


@dataclass(frozen=True)
class Job:
    """What is to be planned: a set-up module, its data and the settings."""

    module: LightningModule
    loader: GlobalBatchLoader
    trial: TrialStep
    planner: PlannerConfig
    profiler: ProfilerConfig
    precision: str
    device: torch.device
    num_local_ranks: int
    self_check: bool
    kept_gradient_bytes: int = 0  # whole gradients of a sharded model, between the backwards of a window


def prepare_planner(job: Job, services: Services) -> tuple[ProfileTable, Planner]:
    """Check the model, make the process groups, load or measure the profile, make the planner. A collective.

    Raises:
        EngineError: a model whose tokens mix outside the engine, or that calls no attention.
        ProfileError: no usable price.
        ConfigError: a family with too many process groups, or a kernel that cannot run the model.
    """
    world = services.agreement.world_size
    shape = services.agreement.together(lambda: inspect_module(job, services.router, world))
    name = services.config.kernel
    kind = job.device.type, shape.dtype, shape.head_dim
    services.agreement.together(lambda: require_kernel(name, *kind).name)
    rank_zero_info(f"zellige: attention kernel {choice_in_words(*kind)}")
    degrees = planned_degrees(world, job.planner.max_degree)
    configs = tuple(c for c in legal_configs(shape.num_heads, world) if c.degree in degrees)
    topology = services.engine.observer.topology = services.topology(job.planner.ranks_per_node)
    with connections.recorded():
        services.groups.prepare(legal_family(topology, job.planner.family, degrees))
    geometry = services.agreement.together(
        lambda: measure_geometry(job.module, services.router, job.trial, shape, services.saving.mode, configs)
    )
    memory = MemoryModel(services.largest(geometry))
    cap_mib = memory_cap_mib(job, services, memory.geometry.step_bytes)
    saved = saved_bytes_per_token(shape, geometry.num_layers)
    services.saving = replace(services.saving, bytes_per_token=saved, cap_mib=cap_mib)
    table = _profile(job, services, shape, configs, topology, memory, cap_mib)
    planner = make_planner(job.planner, table, memory, topology, shape.num_heads, cap_mib)
    if services.agreement.rank == 0:
        planner.prepare()  # compiles before the first step; whatever is wrong shows again where it is agreed
    rank_zero_info(
        f"zellige: {len(job.loader.buckets)} buckets, {len(configs)} configurations,"
        f" {services.groups}, cap {cap_mib / 1024:.2f} GiB"
    )
    return table, planner


def inspect_module(job: Job, router: AttentionRouter, world_size: int) -> AttentionShape:
    """The attention of a copy of the model, once it is known that its tokens mix nowhere else.

    Raises:
        EngineError: no mixin, no attention call, a copy that is none, or tokens that mix outside the engine
            or between sequences.
    """
    require_mixin(job.module)
    clone = copy_module(job.module, 1)
    shape = attention_shape(clone, router, job.trial)
    check_copy(clone, job.module, router, job.trial)
    if job.self_check and world_size > 1 and job.planner.max_degree != 1:
        check_locality(clone, router, job.trial)
    if job.self_check:
        check_packing(clone, router, job.trial)
    return shape


def _profile(
    job: Job,
    services: Services,
    shape: AttentionShape,
    configs: tuple[ParallelConfig, ...],
    topology: Topology,
    memory: MemoryModel,
    cap_mib: int,
) -> ProfileTable:
    buckets = job.loader.buckets
    kernel = kernel_for(job.device.type, shape.dtype, shape.head_dim).name
    recomputed = services.agreement.together(
        lambda: recomputes_attention(job.module, services.router, job.trial)
    )
    engine = (
        f"{services.config.priced}, kernel={kernel}, checkpointing={recomputed},"
        f" clock={job.profiler.clock}, family={job.planner.family}"
    )
    fingerprint = fingerprint_of(job.module, buckets, configs, topology, job.precision, engine, job.device)

    def measure() -> ProfileTable:
        measurement = Measurement(
            job.module,
            services.engine,
            services.router,
            services.agreement,
            job.trial,
            job.profiler.all_layers_up_to,
            services.saving,
        )
        family = job.planner.family
        return measure_table(
            measurement, job.profiler, buckets, configs, topology, family, memory, cap_mib, fingerprint
        )

    path = job.profiler.file(fingerprint)
    agreement = services.agreement
    services.measure_again = lambda: load_or_measure(
        agreement, path, fingerprint, measure, rank_zero_info, anew=True
    )
    return load_or_measure(agreement, path, fingerprint, measure, rank_zero_info)


def memory_cap_mib(job: Job, services: Services, step_bytes: int = 0) -> int:
    """M_cap = M_usable - M_base (paper, Sec. IV-B), or the user's `memory_cap_gib`; the smallest of all
    ranks.

    Raises:
        ConfigError: nothing is left for sequences.
    """
    if job.planner.memory_cap_gib is not None:
        return max(1, int(job.planner.memory_cap_gib * 1024))
    budget = memory_budget(job.module, job.device, job.num_local_ranks, step_bytes, job.kept_gradient_bytes)
    rank_zero_info(f"zellige: {budget}")
    smallest = min(cap for (cap,) in services.agreement.gather([budget.cap_mib]))
    if smallest < 1:
        raise ConfigError(
            f"parameters, gradients and optimizer state leave {smallest} MiB for sequences",
            fix="use a smaller model, a larger device, or sharded parameters",
        )
    return smallest


def planned_degrees(world_size: int, max_degree: int | None = None) -> frozenset[int]:
    """Split degrees that are profiled and get process groups: divisors of N and powers of two up to N."""
    limit = min(world_size, max_degree or world_size)
    powers = {2**i for i in range(limit.bit_length())}
    return frozenset(d for d in range(1, limit + 1) if world_size % d == 0 or d in powers)
