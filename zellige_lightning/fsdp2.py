"""`Trainer(strategy="zellige_fsdp2")`: placement of sequences with parameters sharded by FSDP2, for models
that do not fit on one device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from zellige_lightning.accumulation import accumulates
from zellige_lightning.errors import ConfigError
from zellige_lightning.memory_budget import usable_bytes
from zellige_lightning.mixin import CoalescedAttentionMixin
from zellige_lightning.placing import PlacingStrategy
from zellige_lightning.registration import register
from zellige_lightning.sharded_checkpoint import holds_shards, save_sharded, verify
from zellige_lightning.sharding import shard, trained_bytes
from zellige_lightning.trial import template_of

KEPT_SHARE = 0.25  # of the memory, that whole gradients may take between the backwards of a window


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks, without anything to write in the LightningModule.

    Args:
        keep_gradients: keep whole gradients until the last backward of an accumulation window (or of a batch
            that trains in waves), and reduce them once; otherwise each backward reduces into the shards. None
            keeps them where they take at most a quarter of the device's memory. Both are exact.
        start_method: as for `DDPStrategy`.
        timeout, process_group_backend: as for `ModelParallelStrategy`.
    """

    def __init__(
        self,
        *,
        keep_gradients: bool | None = None,
        start_method: str = "popen",
        timeout: timedelta | None = default_pg_timeout,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(tensor_parallel_size=1, timeout=timeout, process_group_backend=process_group_backend)
        self._start_method, self._keep_gradients = start_method, keep_gradients
        self._template_layers, self._blocked = 2, False

    def setup_environment(self) -> None:
        order_communicators(self.root_device)
        self._setup_distributed()
        # One axis over the default group: Lightning's mesh of two makes a group of one for each rank.
        self._device_mesh = init_device_mesh(
            self.root_device.type, (self.world_size,), mesh_dim_names=("data_parallel",)
        )
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and isinstance(self.model, LightningModule)
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        assert isinstance(self.model, LightningModule)
        shard(self.model, self.device_mesh, self.root_device, self._template_layers)
        self.model_to_device()  # nothing moves any more; Lightning notes the device
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    # ---- the step: always through the root's `__call__`, which gathers its parameters --------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.train_step_context():
            return self._through_root("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._through_root("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._through_root("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._through_root("predict_step", *args, **kwargs)

    def _through_root(self, method: str, *args: Any, **kwargs: Any) -> Any:
        assert self.model is not None and self.lightning_module is not None
        return self._forward_redirection(self.model, self.lightning_module, method, *args, **kwargs)

    @property
    def keeps_gradients(self) -> bool:
        """Whether whole gradients are kept between the backwards of a window."""
        if self._keep_gradients is not None or self.model is None:
            return bool(self._keep_gradients)
        most = KEPT_SHARE * usable_bytes(self.root_device, self.num_processes)
        return trained_bytes(self.model) <= most

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        root = self.model
        if self._blocked or not self.keeps_gradients or not isinstance(root, FSDPModule):
            yield  # waves of a batch that is itself accumulated: the outer block ends it
            return
        self._blocked = True
        root.set_requires_gradient_sync(False)
        root.set_is_last_backward(False)
        try:
            yield
        finally:
            self._blocked = False
            root.set_requires_gradient_sync(True)
            root.set_is_last_backward(True)

    # ---- checkpoints: folders, written beside their place and renamed -------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if storage_options is not None:
            raise ConfigError("storage_options for a sharded checkpoint", fix="leave them out")
        sharded = [name for name, state in checkpoint.items() if name == "state_dict" or holds_shards(state)]
        tensors = {name: checkpoint.pop(name) for name in sharded}
        for number, state in enumerate(checkpoint.pop("optimizer_states", [])):
            tensors[f"optimizer_{number}"] = state
        save_sharded(tensors, checkpoint, Path(self.broadcast(filepath)))

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            verify(path)
        return super().load_checkpoint(path, weights_only)


def order_communicators(device: torch.device) -> None:
    """Let NCCL run collectives in the order in which the host asks for them, which is the same on all ranks.
    FSDP2 gathers on streams of its own while the engine exchanges over other communicators; ranks that ran
    them in different orders could wait for each other for ever."""
    if device.type != "cuda":
        return
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if torch.cuda.nccl.version() < (2, 26):
        rank_zero_warn(
            f"NCCL {torch.cuda.nccl.version()} cannot order collectives of several communicators; 2.26 and"
            " later can. If ranks wait for each other, planner.max_degree=1 leaves one communicator."
        )


class ZelligeFSDP2Strategy(PlacingStrategy, ShardedStrategy):  # type: ignore[misc]
    """Places each sequence of a global batch on ranks of its own choice; parameters, gradients and optimizer
    states are sharded over all ranks. Takes the arguments of `PlacingStrategy` and `ShardedStrategy`."""

    strategy_name = "zellige_fsdp2"

    def setup(self, trainer: Trainer) -> None:
        self._template_layers = self.profiler_config.all_layers_up_to
        super().setup(trainer)
        template = template_of(self.lightning_module)
        if isinstance(template, CoalescedAttentionMixin):
            template.route_attention(self.services.router)

    def _kept_gradient_bytes(self) -> int:
        several = accumulates(self._trainer) or self.planner_config.max_waves > 1
        kept = several and self.world_size > 1 and self.keeps_gradients
        return trained_bytes(self._trainer.lightning_module) if kept else 0

    def _call(self, method: str, *args: Any) -> Any:
        return self._through_root(method, *args)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> None:
        if self._alone:
            rank_zero_warn("no checkpoint is saved: other ranks hold parts of it, and have stopped")
            return
        super().save_checkpoint(checkpoint, filepath, *args, **kwargs)


register()
