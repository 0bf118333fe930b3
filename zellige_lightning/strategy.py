"""`Trainer(strategy="zellige")`: placement of sequences, with all parameters on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel

from zellige_lightning.accumulation import accumulates
from zellige_lightning.batch import RankBatch
from zellige_lightning.errors import ConfigError
from zellige_lightning.lookahead import PendingStep
from zellige_lightning.memory_budget import require_room
from zellige_lightning.placing import PlacingStrategy
from zellige_lightning.registration import register
from zellige_lightning.sharded_checkpoint import is_sharded
from zellige_lightning.sharding import materialize

# DDP's switch for sending rank 0's buffers around before every forward; it was renamed in torch 2.13.
_NO_BUFFER_SYNC = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class ZelligeStrategy(PlacingStrategy, DDPStrategy):
    """`Trainer(strategy="zellige")`: every rank holds all parameters, as under `DDPStrategy`, whose arguments
    it takes besides those of `PlacingStrategy`.

    Raises:
        ConfigError: unknown or contradicting settings.
    """

    strategy_name = "zellige"

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("find_unused_parameters", False)
        settings.setdefault("gradient_as_bucket_view", True)
        settings.setdefault(_NO_BUFFER_SYNC, False)
        super().__init__(**settings)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if is_sharded(Path(checkpoint_path)):
            raise ConfigError(
                f"checkpoint {Path(checkpoint_path).name!r} holds sharded parameters",
                fix="go on with strategy=zellige_fsdp2, or make one file of it with zellige-export",
            )
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def setup_environment(self) -> None:
        super().setup_environment()
        self._require_room()  # before a model that was built without memory gets any

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self.lightning_module
        assert module is not None
        materialize(module, module, self.root_device)  # nothing can be copied into what has no memory
        super().load_model_state_dict(checkpoint, strict=strict)

    def take(self, pending: PendingStep) -> RankBatch:
        first = super().take(pending)
        step = self.planned_step
        if step is not None and len(step.waves) > 1 and self._ddp_kwargs.get("static_graph"):
            error = ConfigError(
                "static_graph=True, and a batch that trains in waves: torch reduces a static graph only once",
                fix="leave static_graph off; placement needs no static graph",
                step=step.batch.step,
            )
            error.agreed = True  # all ranks hold the same plan
            raise error
        return first

    def _require_room(self) -> None:
        module = self.lightning_module
        assert module is not None
        if module.trainer.state.fn == TrainerFn.FITTING:
            room = self.root_device, self.num_processes
            self.services.agreement.together(lambda: require_room(module, *room))

    def setup(self, trainer: Trainer) -> None:
        if self._ddp_kwargs.get("static_graph") and accumulates(trainer):
            raise ConfigError(
                "static_graph=True with accumulate_grad_batches > 1 loses gradients",
                fix="leave static_graph off; placement needs no static graph",
            )
        module = self.lightning_module
        assert module is not None
        self._require_room()
        materialize(module, module, self.root_device)
        super().setup(trainer)


register()
