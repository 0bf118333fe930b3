"""Trains a global batch that does not fit at once in waves: planned parts, one after the other, whose losses
add up to the loss of the whole batch. Gradients are reduced over the ranks only in the last one.

All waves but the last run forward and backward inside `training_step`. Lightning zeroes gradients between a
training step and its backward, so it is made to leave them alone here, after they were zeroed at the
beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule
from torch import Tensor

from zellige_lightning.batch import RankBatch
from zellige_lightning.lookahead import PlannedStep
from zellige_lightning.mixin import require_mixin

if TYPE_CHECKING:
    from zellige_lightning.placing import PlacingStrategy

_HOOK = "optimizer_zero_grad"


def train_waves(
    strategy: PlacingStrategy,
    step: PlannedStep,
    training_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Forward and backward of all waves but the last, and the forward of the last.

    Args:
        training_step: the strategy's own, for one wave.
        args, kwargs: what Lightning calls it with; the first is the first wave.

    Returns:
        The last wave's output, its loss raised by the (detached) losses of the others, so that the value is
        the batch's loss and the gradient the last wave's part.
    """
    module = strategy.lightning_module
    assert module is not None
    if step.opens_window:
        for optimizer in strategy.optimizers:
            module.optimizer_zero_grad(module.current_epoch, module.trainer.fit_loop.batch_idx, optimizer)
    hold_gradients(module)
    routed = require_mixin(module)
    routed._wave_sums = {}
    try:
        return _run(strategy, module, step.waves, training_step, args, kwargs)
    finally:
        routed._wave, routed._wave_sums = (0, 0), None


def _run(
    strategy: PlacingStrategy,
    module: LightningModule,
    waves: list[RankBatch],
    training_step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    before: Tensor | None = None
    last = len(waves) - 1
    for number, wave in enumerate(waves):
        require_mixin(module)._wave = number, last
        if number:
            batch = _as_lightning_would(strategy, module, wave)
            args = (batch, *args[1:])
        with strategy.services.attending(module, wave):
            if number == last:
                return _raised(training_step(*args, **kwargs), before)
            with strategy.block_backward_sync():
                loss = _loss(training_step(*args, **kwargs))
                _backward(strategy, module, loss)
        before = loss.detach() if before is None else before + loss.detach()
    raise AssertionError("a planned step has at least one wave")


def hold_gradients(module: LightningModule) -> None:
    """Let Lightning zero nothing until `release_gradients`: what is there belongs to this step."""
    setattr(module, _HOOK, lambda *args, **kwargs: None)


def release_gradients(module: LightningModule | None) -> None:
    """The module's own `optimizer_zero_grad` again."""
    if module is not None:
        module.__dict__.pop(_HOOK, None)


def _as_lightning_would(strategy: PlacingStrategy, module: LightningModule, wave: RankBatch) -> Any:
    """The wave through the user's hooks and onto the device."""
    return strategy.batch_to_device(module._on_before_batch_transfer(wave), dataloader_idx=0)


def _backward(strategy: PlacingStrategy, module: LightningModule, loss: Tensor) -> None:
    """As Lightning does it, without its hooks, which are for the whole batch."""
    scaler = getattr(strategy.precision_plugin, "scaler", None)
    loss = loss / module.trainer.accumulate_grad_batches
    module.backward(scaler.scale(loss) if scaler is not None else loss)


def _loss(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, Mapping) else output
    assert isinstance(loss, Tensor)
    return loss


def _raised(output: Any, before: Tensor | None) -> Any:
    if before is None:
        return output
    total = _loss(output) + before
    return {**output, "loss": total} if isinstance(output, Mapping) else total
