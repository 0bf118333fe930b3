"""Looks at a user's model before anything is planned: its geometry, its memory per token, and whether its tokens mix
only inside the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from zellige_lightning.batch import RankBatch, materialize
from zellige_lightning.datamodule import local_batch
from zellige_lightning.engine import AttentionRouter, varlen_attention
from zellige_lightning.errors import EngineError
from zellige_lightning.mixin import CoalescedAttentionMixin
from zellige_lightning.placement import Bucket, GlobalBatch, ParallelConfig, PlacementOption, Plan
from zellige_lightning.planner import ModelGeometry
from zellige_lightning.sources import TokenSource

_FORWARD_ENDS = "zellige: forward ends"
_MEMORY_TOKENS = 256  # enough that tensors per token outweigh tensors per sequence


@dataclass(frozen=True)
class AttentionShape:
    num_heads: int
    head_dim: int
    element_bytes: int


def layer_list(module: nn.Module, attention_names: list[str]) -> nn.ModuleList | None:
    """The list of equal layers that holds the attention modules, if there is exactly one."""
    lists = set()
    for name in attention_names:
        parts = name.split(".")
        parents = [module.get_submodule(".".join(parts[:i])) for i in range(1, len(parts))]
        lists.add(next((p for p in parents if isinstance(p, nn.ModuleList)), None))
    (only,) = lists if len(lists) == 1 else (None,)
    return only if only is not None and len({type(layer) for layer in only}) == 1 else None


def copy_module(module: LightningModule, num_layers: int | None = None) -> LightningModule:
    """A copy whose parameters are its own, with the first `num_layers` layers; logs nothing.

    Profiling runs on copies: the hooks of the data-parallel wrapper count every backward on live parameters.
    """
    assert isinstance(module, CoalescedAttentionMixin)
    memo: dict[int, Any] = {}
    layers = layer_list(module, list(module.attention_modules()))
    if num_layers is not None and layers is not None:
        memo[id(layers)] = nn.ModuleList([copy.deepcopy(layer) for layer in layers[:num_layers]])
    clone = copy.deepcopy(module, memo)
    clone._trainer = module._trainer
    clone.log = clone.log_dict = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return clone


def attention_shape(clone: LightningModule, router: AttentionRouter, source: TokenSource) -> AttentionShape:
    """Heads, head dim and element size, as the first attention call of a small step shows them.

    Raises:
        EngineError: `training_step` reaches no routed attention.
    """
    seen: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        seen.append(q)
        return _per_token(q, k, v, scale)

    with router.answered_by(attention), torch.no_grad():
        clone.training_step(local_batch(_small_batch(), source), 0)
    if not seen:
        raise EngineError(
            f"the modules {clone.coalesced_attention!r} called no F.scaled_dot_product_attention",
            fix="match the modules whose forward calls it, or call it instead of a kernel of your own",
        )
    _, heads, dim = seen[0].shape
    return AttentionShape(heads, dim, seen[0].element_size())


def check_locality(clone: LightningModule, router: AttentionRouter, source: TokenSource) -> None:
    """Compare a small sequence whole and in two shards, with attention replaced by a function of single tokens.

    Whatever then differs mixes tokens outside the engine, or takes positions from the shard: it would make the loss
    depend on the placement.

    Raises:
        EngineError: names the first module whose output differs, or the loss.
    """
    clone.eval()
    batch = _small_batch()
    length = batch.sequences[0].num_tokens
    split = Plan(0, 2, (PlacementOption(ParallelConfig(2, 1, 1), (0, 1)),), (0, 0), (0, 0))
    shards = [materialize(batch, split, rank, source) for rank in (0, 1)]
    with router.answered_by(_per_token), torch.no_grad():
        whole, loss = _outputs(clone, local_batch(batch, source))
        parts = [_shard_outputs(clone, shard, whole) for shard in shards]
    for name, output in whole.items():
        pieces = [outputs.get(name) for outputs, _ in parts]
        if not _agrees(output, pieces, [length, *(s.num_tokens for s in shards)]):
            raise _mixes(name or type(clone).__name__)
    total = sum(part for _, part in parts) / 2
    if not torch.allclose(total.double(), loss.double(), rtol=_tolerance(loss), atol=1e-7):
        raise EngineError(
            f"training_step's loss of two shards is {float(total):.6g}, of the whole sequence {float(loss):.6g}",
            fix="return batch.reduce(per_token_loss); a mean over local tokens depends on the placement",
        )


def _mixes(name: str) -> EngineError:
    return EngineError(
        f"module {name!r} mixes tokens outside the engine: its output for a shard differs from the whole sequence",
        fix="list it in `coalesced_attention` if it is self-attention; make it act on single tokens, with positions"
        " from batch.positions; or keep every sequence whole with planner.max_degree=1",
    )


def _shard_outputs(
    clone: LightningModule, shard: RankBatch, whole: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    reached: list[str] = []
    try:
        return _outputs(clone, shard, reached)
    except EngineError:
        raise
    except Exception as error:  # a module that needs the whole grid fails on a shard
        raise _mixes(reached[-1] if reached else type(clone).__name__) from error


def _outputs(
    clone: LightningModule, batch: RankBatch, reached: list[str] | None = None
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
        loss = clone.training_step(batch.to(clone.device), 0)
    finally:
        for handle in handles:
            handle.remove()
    return outputs, loss["loss"] if isinstance(loss, dict) else loss


def _agrees(whole: Tensor, parts: list[Tensor | None], sizes: list[int]) -> bool:
    """Whether the shards' outputs are the whole's, cut along the token axis, or equal it where there is none."""
    if any(part is None or part.dim() != whole.dim() for part in parts):
        return False
    tensors = [part for part in parts if part is not None]
    for axis in range(whole.dim()):
        if [whole.shape[axis], *(part.shape[axis] for part in tensors)] == sizes:
            return _close(torch.cat(tensors, axis), whole)
    return all(part.shape == whole.shape and _close(part, whole) for part in tensors)


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


def _small_batch(grid: tuple[int, int, int] = (2, 3, 5)) -> GlobalBatch:
    return GlobalBatch.of(0, 0, [("trace", Bucket("trace", grid))])


def measure_geometry(
    module: LightningModule, router: AttentionRouter, source: TokenSource, shape: AttentionShape
) -> ModelGeometry:
    """The memory model's coefficients, from the allocations of one step of one and of two layers."""
    assert isinstance(module, CoalescedAttentionMixin)
    layers = layer_list(module, list(module.attention_modules()))
    num_layers = len(layers) if layers is not None else 1
    batch = _small_batch((1, 1, _MEMORY_TOKENS))
    depths = (1, 2) if layers is not None and num_layers > 1 else (1,)
    measured = [_step_memory(copy_module(module, depth), router, batch, source) for depth in depths]
    (resident, peak), last = measured[0], measured[-1]
    per_layer = last[0] - resident if len(measured) > 1 else 0
    total = resident + per_layer * (num_layers - 1)
    return ModelGeometry(
        num_layers=num_layers,
        num_heads=shape.num_heads,
        head_dim=shape.head_dim,
        element_bytes=shape.element_bytes,
        resident_bytes_per_token=max(1, total // _MEMORY_TOKENS),
        transient_bytes_per_token=max(1, max(peak, last[1]) // _MEMORY_TOKENS),
        bytes_per_sequence=0,
    )


def _step_memory(
    clone: LightningModule, router: AttentionRouter, batch: GlobalBatch, source: TokenSource
) -> tuple[int, int]:
    """(bytes held from forward to backward, peak above them) of one step, gradients not counted."""
    planned = local_batch(batch, source).to(clone.device)
    gradients = sum(p.numel() * p.element_size() for p in clone.parameters() if p.requires_grad)

    def forward() -> Tensor:
        loss = clone.training_step(planned, 0)
        return loss["loss"] if isinstance(loss, dict) else loss

    with router.answered_by(_local_attention), torch.enable_grad():
        resident, peak = held_and_peak(forward, lambda loss: loss.backward(), clone.device)
    return resident, max(0, peak - resident - gradients)


def _local_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Costs the memory of q, k, v and out, as the engine does."""
    return varlen_attention(q, k, v, [q.shape[0]], [k.shape[0]], scale)


def held_and_peak(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], device: torch.device
) -> tuple[int, int]:
    """Bytes that `forward` leaves allocated, and the peak of both calls, above what was there before.

    On CUDA from the allocator. On CPU from the profiler's memory events, which also see what happens inside custom
    operators; trackers built on dispatch modes do not.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
        loss = forward()
        held = torch.cuda.memory_allocated(device) - base
        backward(loss)
        return held, torch.cuda.max_memory_allocated(device) - base
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = forward()
        with torch.profiler.record_function(_FORWARD_ENDS):
            held_now = loss
        backward(held_now)
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    forward_ends = next(e.start_ns() for e in events if e.name() == _FORWARD_ENDS)
    total = peak = held = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
        if event.start_ns() <= forward_ends:
            held = total
    return held, peak
