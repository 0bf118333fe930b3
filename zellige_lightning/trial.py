"""Steps of copies of a user's model on synthetic tokens: what the checks, the memory model and the
profiler run, so that the model itself is never touched before it trains."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from zellige_lightning.batch import RankBatch
from zellige_lightning.errors import EngineError
from zellige_lightning.mixin import CoalescedAttentionMixin
from zellige_lightning.sources import FieldSpec, SyntheticSource, TokenSource


def layer_list(module: nn.Module, attention_names: list[str]) -> nn.ModuleList | None:
    """The list of equal layers that holds the attention modules, if there is exactly one."""
    lists = set()
    for name in attention_names:
        parts = name.split(".")
        parents = [module.get_submodule(".".join(parts[:i])) for i in range(1, len(parts))]
        lists.add(next((p for p in parents if isinstance(p, nn.ModuleList)), None))
    (only,) = lists if len(lists) == 1 else (None,)
    return only if only is not None and len({type(layer) for layer in only}) == 1 else None


_TEMPLATE = "_zellige_template"


def keep_template(module: LightningModule, template: LightningModule) -> None:
    """Let `copy_module` copy `template`, a module of the same kind that may have fewer layers: one whose
    parameters are sharded cannot be copied itself."""
    module.__dict__[_TEMPLATE] = (template,)  # not as a submodule


def template_of(module: LightningModule | None) -> LightningModule | None:
    """What `keep_template` was given for that module."""
    kept = module.__dict__.get(_TEMPLATE) if module is not None else None
    return kept[0] if kept else None


def copy_module(module: LightningModule, num_layers: int | None = None) -> LightningModule:
    """A copy whose parameters are its own, with the first `num_layers` layers; logs nothing.

    Profiling runs on copies: the hooks of the data-parallel wrapper count every backward on live parameters.
    """
    assert isinstance(module, CoalescedAttentionMixin)
    source = template_of(module) or module
    assert isinstance(source, CoalescedAttentionMixin)
    memo: dict[int, Any] = {}
    layers = layer_list(source, list(source.attention_modules()))
    if num_layers is not None and layers is not None:
        memo[id(layers)] = nn.ModuleList([copy.deepcopy(layer) for layer in layers[:num_layers]])
    clone = copy.deepcopy(source, memo)
    if source is not module:
        clone.to(module.device)
    clone._trainer = module._trainer
    for name in ("log", "log_dict"):
        setattr(clone, name, lambda *args, **kwargs: None)
    return clone


class TrialStep:
    """Runs `training_step` of copies in the precision of the run.

    Args:
        precision: the trainer's plugin; decides the dtype of inputs and the autocast of the forward.
        source: whose fields the synthetic tokens copy. It is not read itself: it knows its samples only.
    """

    def __init__(self, precision: Precision, source: TokenSource) -> None:
        self._precision = precision
        self.source = SyntheticSource(
            self._converted(source.token_fields), self._converted(source.sequence_fields)
        )

    def _converted(self, fields: Mapping[str, FieldSpec]) -> dict[str, FieldSpec]:
        def dtype(spec: FieldSpec) -> torch.dtype:
            converted: Tensor = self._precision.convert_input(torch.empty(0, dtype=spec.dtype))
            return converted.dtype

        return {name: FieldSpec(spec.shape, dtype(spec)) for name, spec in fields.items()}

    def loss(self, clone: LightningModule, batch: RankBatch) -> Tensor:
        """The loss of one step.

        Raises:
            EngineError: a `training_step` that returns no loss.
        """
        with self._precision.train_step_context():
            returned: Any = clone.training_step(batch.to(clone.device), 0)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor):
            raise EngineError(
                f"training_step of {type(clone).__name__} returned {type(loss).__name__} instead of a loss",
                fix="return batch.reduce(per_token_loss) for every planned batch: all ranks join a step",
            )
        return loss
