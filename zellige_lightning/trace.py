"""Looks at a user's model before anything is planned: its attention, and whether its tokens mix only inside
the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from zellige_lightning.batch import RankBatch, local_batch, materialize
from zellige_lightning.engine import AttentionRouter
from zellige_lightning.errors import EngineError
from zellige_lightning.placement import Bucket, GlobalBatch, ParallelConfig, PlacementOption, Plan
from zellige_lightning.trial import TrialStep

_GRID = (3, 3, 3)  # an odd number of tokens, so that two shards differ in size


@dataclass(frozen=True)
class AttentionShape:
    num_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize


def attention_shape(clone: LightningModule, router: AttentionRouter, trial: TrialStep) -> AttentionShape:
    """Heads, head dim and dtype, as the first attention call of a small step shows them.

    Raises:
        EngineError: `training_step` reaches no routed attention.
    """
    seen: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        seen.append(q)
        return _per_token(q, k, v, scale)

    with router.answered_by(attention), torch.no_grad():
        trial.loss(clone, local_batch(small_batch(), trial.source))
    if not seen:
        raise EngineError(
            f"the modules {clone.coalesced_attention!r} called no F.scaled_dot_product_attention",
            fix="match the modules whose forward calls it, or call it instead of a kernel of your own",
        )
    _, heads, dim = seen[0].shape
    return AttentionShape(heads, dim, seen[0].dtype)


def check_copy(
    clone: LightningModule, module: LightningModule, router: AttentionRouter, trial: TrialStep
) -> None:
    """Whatever is measured runs forward and backward of copies. Where those reach the parameters that train,
    gradients appear that no step asked for, and the wrapper that reduces them counts along.

    Raises:
        EngineError: names parameters of `module` that a step of its copy `clone` runs through.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    with router.answered_by(_per_token), torch.enable_grad():
        loss = trial.loss(clone, local_batch(small_batch(), trial.source))
    if reached := [names[id(leaf)] for leaf in _trained_by(loss) if id(leaf) in names]:
        raise EngineError(
            f"a copy of {type(module).__name__} runs parameters of the original, such as {min(reached)!r}",
            fix="copy.deepcopy leaves functions alone: where a forward was replaced by a function that holds"
            " the layer, override the method instead",
        )


def _trained_by(loss: Tensor) -> list[Tensor]:
    """The tensors that a backward of `loss` would give gradients to."""
    waiting: list[Any] = [loss.grad_fn]
    seen, leaves = set[Any]({None}), list[Tensor]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaves += [node.variable] if hasattr(node, "variable") else []
        waiting += [following for following, _ in node.next_functions]
    return leaves


def check_locality(clone: LightningModule, router: AttentionRouter, trial: TrialStep) -> None:
    """Compare a small sequence whole and in two shards; a function of single tokens replaces attention.

    Whatever then differs mixes tokens outside the engine, or takes positions from the shard: it would make
        the
    loss depend on the placement.

    Raises:
        EngineError: names the first module whose output differs, or the loss.
    """
    clone.eval()
    batch = small_batch()
    length = batch.sequences[0].num_tokens
    split = Plan(0, 2, (PlacementOption(ParallelConfig(2, 1, 1), (0, 1)),), (0, 0), (0, 0))
    shards = [materialize(batch, split, rank, trial.source) for rank in (0, 1)]
    with router.answered_by(_per_token), torch.no_grad():
        whole, loss = _outputs(clone, local_batch(batch, trial.source), trial)
        parts = [_shard_outputs(clone, shard, trial) for shard in shards]
    for name, output in whole.items():
        pieces = [outputs.get(name) for outputs, _ in parts]
        if not _agrees(output, pieces, [length, *(s.num_tokens for s in shards)]):
            raise _mixes(name or type(clone).__name__)
    total = (parts[0][1] + parts[1][1]) / 2
    if not _same_loss(total, loss):
        raise EngineError(
            f"training_step's loss of two shards is {float(total):.6g}, of the whole sequence"
            f" {float(loss):.6g}",
            fix="return batch.reduce(per_token_loss); a mean over local tokens depends on the placement",
        )


def check_packing(clone: LightningModule, router: AttentionRouter, trial: TrialStep) -> None:
    """Compare two sequences on one rank with each of them alone; attention is replaced as in
    `check_locality`.

    Raises:
        EngineError: names the first module that mixes tokens of different sequences, or the loss.
    """
    clone.eval()
    samples = [("trace", Bucket("trace", _GRID)), ("trace-image", Bucket("trace-image", (1, 4, 4)))]
    batches = [GlobalBatch.of(0, 0, rows) for rows in (samples, samples[:1], samples[1:])]
    with router.answered_by(_per_token), torch.no_grad():
        packed, *alone = [_outputs(clone, local_batch(batch, trial.source), trial) for batch in batches]
    for name, output in packed[0].items():
        if not _joins(output, [outputs.get(name) for outputs, _ in alone]):
            raise EngineError(
                f"module {name!r} mixes tokens of different sequences: its output for two packed"
                " sequences is not that of each alone",
                fix="keep sequences apart by batch.lengths or batch.segment_ids; take positions from"
                " batch.positions",
            )
    mean = (alone[0][1] + alone[1][1]) / 2
    if not _same_loss(mean, packed[1]):
        raise EngineError(
            f"training_step's loss of two packed sequences is {float(packed[1]):.6g}, the mean of both"
            f" alone is {float(mean):.6g}",
            fix="return batch.reduce(per_token_loss); a mean over local tokens depends on the placement",
        )


def _mixes(name: str) -> EngineError:
    return EngineError(
        f"module {name!r} mixes tokens outside the engine: its output for a shard differs from that for the"
        " whole sequence",
        fix="list it in `coalesced_attention` if it is self-attention; make it act on single tokens, with"
        " positions from batch.positions; or keep every sequence whole with planner.max_degree=1",
    )


def _shard_outputs(
    clone: LightningModule, shard: RankBatch, trial: TrialStep
) -> tuple[dict[str, Tensor], Tensor]:
    reached: list[str] = []
    try:
        return _outputs(clone, shard, trial, reached)
    except EngineError:
        raise
    except Exception as error:  # a module that needs the whole grid fails on a shard
        raise _mixes(reached[-1] if reached else type(clone).__name__) from error


def _outputs(
    clone: LightningModule, batch: RankBatch, trial: TrialStep, reached: list[str] | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensor that each module returned at its first call, in order of completion, and the loss."""
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs.setdefault(name, output.detach())

        return hook

    def enter(name: str) -> Any:
        return lambda module, args: reached.append(name) if reached is not None else None

    handles = [m.register_forward_hook(note(n)) for n, m in clone.named_modules() if n]
    handles += [m.register_forward_pre_hook(enter(n)) for n, m in clone.named_modules() if n]
    try:
        loss = trial.loss(clone, batch)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, loss


def _agrees(whole: Tensor, parts: list[Tensor | None], sizes: list[int]) -> bool:
    """Whether the shards' outputs are the whole's, cut along the token axis, or equal it if there is none."""
    if any(part is None or part.dim() != whole.dim() for part in parts):
        return False
    tensors = [part for part in parts if part is not None]
    for axis in range(whole.dim()):
        if [whole.shape[axis], *(part.shape[axis] for part in tensors)] == sizes:
            return _close(torch.cat(tensors, axis), whole)
    return all(part.shape == whole.shape and _close(part, whole) for part in tensors)


def _joins(packed: Tensor, alone: list[Tensor | None]) -> bool:
    """Whether the outputs of single sequences, one behind the other, are the packed one. True where they are
    laid out in some other way, such as padded."""
    if any(part is None or part.dim() != packed.dim() for part in alone):
        return True
    parts = [part for part in alone if part is not None]
    for axis in range(packed.dim()):
        others = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in (packed, *parts)}
        if len(others) == 1 and packed.shape[axis] == sum(part.shape[axis] for part in parts):
            return _close(torch.cat(parts, axis), packed)
    return True


def _same_loss(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=_tolerance(b), atol=1e-7)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return a.is_complex() or bool((a == b).all())
    scale = float(b.abs().max()) if b.numel() else 0.0
    return bool(torch.allclose(a.double(), b.double(), rtol=0, atol=_tolerance(b) * max(scale, 1e-6)))


def _tolerance(x: Tensor) -> float:
    return 0.05 if x.dtype in (torch.bfloat16, torch.float16) else 1e-3


def _per_token(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Stands in for attention: depends on q, k and v (so on positions), mixes nothing."""
    return v + 0.5 * q + 0.25 * k


def small_batch(grid: tuple[int, int, int] = _GRID) -> GlobalBatch:
    return GlobalBatch.of(0, 0, [("trace", Bucket("trace", grid))])
