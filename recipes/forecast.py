"""`zellige-train dry_run=true`: what a run would need on GPUs that nobody has rented yet, rank by rank.

Parameters, gradients, optimizer and average are counted; activations are found on fake tensors
(`meta_memory`); the plan is that of a modeled cluster (`conf/cluster`), so its times are modeled too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from zellige_lightning.datamodule import ZelligeDataModule, as_catalog
from zellige_lightning.errors import ConfigError, PlanningError
from zellige_lightning.fsdp2 import KEPT_SHARE
from zellige_lightning.instantiate import instantiate, resolved
from zellige_lightning.placement import Bucket, GlobalBatch
from zellige_lightning.planner import MemoryModel, ModelGeometry, PlannerConfig, ProfileTable, make_planner
from zellige_lightning.planner.waves import Wave
from zellige_lightning.recipes.wan21.meta_memory import MODES, geometry_of
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.sharding import gathered_at_once
from zellige_lightning.simulator.cluster import GIB, Cluster, load_cluster
from zellige_lightning.simulator.constants import Transformer
from zellige_lightning.simulator.inputs import scaled
from zellige_lightning.simulator.prices import modeled_table

_SAVED = {"none": "full", "anchors": "full+anchors", "all": "full+all", "auto": "full"}


@dataclass(frozen=True)
class States:
    """Bytes on one rank that do not depend on its sequences."""

    parameters: int
    gradients: int
    optimizer: int
    average: int
    gathered: int  # layers that a sharded model has put together, and their gradients
    kept: int = 0  # whole gradients of a sharded model, until they are reduced

    @property
    def total(self) -> int:
        whole = self.gathered + self.kept
        return self.parameters + self.gradients + self.optimizer + self.average + whole


def states_of(
    module: WanModule,
    ranks: int,
    *,
    sharded: bool,
    mixed: bool,
    average: bool,
    keeps: Callable[[int], bool] = lambda size: False,
) -> States:
    """Of AdamW, in fp32 (`mixed`) or bf16, as `memory_budget` counts them on the GPU.

    Args:
        keeps: whether a sharded model keeps whole gradients of so many bytes.
    """
    size = 4 if mixed else 2
    whole = size * sum(p.numel() for p in module.parameters())
    share = -(-whole // ranks) if sharded else whole
    layers = [size * sum(p.numel() for p in block.parameters()) for block in module.model.blocks]
    return States(
        parameters=share,
        gradients=share,
        optimizer=2 * share,
        average=share if average else 0,
        gathered=gathered_at_once(whole, layers) if sharded else 0,
        kept=whole if sharded and keeps(whole) else 0,
    )


def forecast(config: DictConfig) -> dict[str, Any]:
    """Print the forecast of `config` and return its figures.

    Raises:
        ConfigError: a model or data of another kind, an unknown cluster, or a world that it does not have.
    """
    with torch.device("meta"):
        module = instantiate(config.model, "model")
    if not isinstance(module, WanModule):
        raise ConfigError(f"a dry run of {type(module).__name__}", fix="choose a wan21 model")
    cluster = load_cluster(config.forecast.cluster)
    mixed = str(config.trainer.precision) != "bf16-true"
    count = sum(p.numel() for p in module.parameters())
    print(
        f"{config.model.model}: {count:,} parameters; {cluster.name}, {cluster.memory_gib:g} GiB per GPU\n"
        "States are counted, activations found on fake tensors, plans and times modeled. GiB per rank."
    )
    geometries = {mode: geometry_of(module.model.config, mode, mixed=mixed) for mode in MODES}
    chosen = _SAVED[config.engine.save_attention] if config.model.activation_checkpointing else "none"
    worlds = {}
    for ranks in config.forecast.ranks:
        batch, where = first_batch(config, ranks)
        print(
            f"\nGlobal batch on {ranks} GPUs: {len(batch.sequences)} sequences, {batch.num_tokens:,} tokens"
            f" ({where})"
        )
        for sharded in (False, True):
            states = states_of(
                module,
                ranks,
                sharded=sharded,
                mixed=mixed,
                average="average" in config.callbacks and config.callbacks.average is not None,
                keeps=lambda size: _keeps(config, cluster, size),
            )
            name = f"{ranks} GPUs, " + ("zellige_fsdp2" if sharded else "zellige")
            world = _World(config, cluster, module, ranks, states)
            worlds[name] = world.show(name, batch, geometries, chosen)
    return {"parameters": count, "worlds": worlds}


def _keeps(config: DictConfig, cluster: Cluster, size: int) -> bool:
    """As `ShardedStrategy.keeps_gradients`."""
    if (
        config.trainer.accumulate_grad_batches == 1
        and PlannerConfig.of(resolved(config.planner, "planner")).max_waves == 1
    ):
        return False
    chosen = config.strategy.get("keep_gradients")
    most = KEPT_SHARE * cluster.memory_gib * cluster.usable_share * GIB
    return bool(size <= most if chosen is None else chosen)


class _World:
    """A number of GPUs, and what is left on them beside the states."""

    def __init__(
        self, config: DictConfig, cluster: Cluster, module: WanModule, ranks: int, states: States
    ) -> None:
        self.cluster, self.states, self.topology = cluster, states, cluster.topology(ranks)
        own = config.planner.memory_cap_gib
        usable = cluster.memory_gib * cluster.usable_share - cluster.communicators_gib
        self.room_gib = usable - states.total / GIB
        self.cap_gib = self.room_gib if own is None else min(self.room_gib, own)
        self.planner = PlannerConfig.of(resolved(config.planner, "planner"))
        c = module.model.config
        self.model = Transformer(
            *(config.model.model, c.num_layers, c.dim, c.num_heads, c.ffn_dim, c.text_len),
            parameters=sum(p.numel() for p in module.parameters()),
        )

    def show(
        self, name: str, batch: GlobalBatch, geometries: dict[str, ModelGeometry], chosen: str
    ) -> dict[str, Any]:
        s = self.states
        parts = {"parameters": s.parameters, "gradients": s.gradients, "optimizer": s.optimizer}
        parts |= {"average": s.average, "layers put together": s.gathered, "kept gradients": s.kept}
        listed = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts.items() if size)
        print(f"{name}: {listed}; sum {s.total / GIB:.1f}, left for sequences {max(0.0, self.room_gib):.1f}")
        figures: dict[str, Any] = {"states_gib": s.total / GIB, "room_gib": self.room_gib, "modes": {}}
        if self.cap_gib * 1024 < 1:
            fix = "" if s.gathered else "; shard with strategy=zellige_fsdp2"
            print(f"  does not fit: the states alone fill the GPU{fix}")
            return figures
        buckets = sorted({s.bucket for s in batch.sequences}, key=lambda b: (b.num_tokens, b.name))
        table = modeled_table(self.cluster, self.model, self.topology, buckets)
        for mode, geometry in geometries.items():
            figures["modes"][mode] = self._mode(mode, geometry, batch, table, mode == chosen)
        return figures

    def _mode(
        self, mode: str, geometry: ModelGeometry, batch: GlobalBatch, table: ProfileTable, chosen: bool
    ) -> list[float]:
        """Peak GiB of each rank, states included; empty if there is no plan."""
        mark = "*" if chosen else " "
        per_token = (geometry.resident_bytes_per_token + geometry.transient_bytes_per_token) / 1024
        try:
            waves = self._plan(geometry, batch, table)
        except PlanningError as error:
            reason = error.message.partition(" ((")[0]  # without what each configuration would need
            print(f" {mark}{mode:13} {per_token:7.0f} KiB/token   no plan: {reason}")
            return []
        peaks = [
            max(wave.plan.memory_mib[r] for wave in waves) / 1024 for r in range(self.topology.world_size)
        ]
        totals = [self.states.total / GIB + peak for peak in peaks]
        splits, seconds = sum(w.plan.num_splits for w in waves), sum(w.plan.predicted_us for w in waves) / 1e6
        print(
            f" {mark}{mode:13} {per_token:7.0f} KiB/token   waves {len(waves)}, splits {splits},"
            f" step {seconds:.1f} s (modeled), peak {max(totals):.1f}"
        )
        if chosen:
            rows = [f"rank {r:3}: {total:6.1f}" for r, total in enumerate(totals)]
            for start in range(0, len(rows), 4):
                print("     " + "   ".join(rows[start : start + 4]))
        return totals

    def _plan(self, geometry: ModelGeometry, batch: GlobalBatch, table: ProfileTable) -> list[Wave]:
        cap = max(1, int(self.cap_gib * 1024))
        heads = geometry.num_heads
        planner = make_planner(self.planner, table, MemoryModel(geometry), self.topology, heads, cap)
        return list(planner.plan_ladder(batch).waves)


def first_batch(config: DictConfig, ranks: int) -> tuple[GlobalBatch, str]:
    """The first global batch of training where the samples are there, else one of the catalog's shapes with
    the budget and share of the configuration; and which of both it is."""
    tokens = config.data.tokens_per_batch or config.data.tokens_per_rank * ranks
    folder = config.data.datamodule.get("folder") if not _missing(config) else None
    if folder is not None and Path(folder).is_dir():
        data = instantiate(config.data, "data", tokens_per_batch=tokens, tokens_per_rank=None)
        assert isinstance(data, ZelligeDataModule)
        data.setup("fit")
        return data.training_loader().epoch_batches(0, window=1, limit=1)[0], f"the first batch of {folder}"
    catalog = as_catalog(resolved(config.catalog, "catalog"))
    if catalog is None:
        raise ConfigError("a dry run without samples and without catalog", fix="give data.datamodule.folder")
    counts = _mixture(list(catalog), tokens, config.data.video_token_share)
    samples = [(f"{b.name}-{i}", b) for b, count in counts.items() for i in range(count)]
    return GlobalBatch.of(0, 0, samples), "the catalog's shapes, of each kind equally many tokens"


def _missing(config: DictConfig) -> bool:
    from omegaconf import OmegaConf

    return OmegaConf.is_missing(config.data.datamodule, "folder")


def _mixture(buckets: list[Bucket], tokens: int, video_share: float | None) -> dict[Bucket, int]:
    share = 0.5 if video_share is None else video_share
    counts: dict[Bucket, int] = {}
    for is_video, part in ((True, share), (False, 1.0 - share)):
        kind = [b for b in buckets if b.is_video is is_video]
        budget = int(tokens * part)
        even = {b: max(1, round(1e6 / b.num_tokens)) for b in kind if b.num_tokens <= budget}
        if even:
            counts |= scaled(even, budget)
    return counts
