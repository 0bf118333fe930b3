"""Activation checkpointing that is safe around split attention.

Recomputation starts when the first saved tensor of a region is unpacked. Where that tensor lies inside the
engine, which one it is depends on the local mix of segments, and the collectives of two ranks pair up
wrongly: a hang, or wrong gradients without an error. So each region ends, on every rank, with a tiny
operation that saves a tensor: recomputation then always starts there, at the same place of everybody's
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from zellige_lightning.engine.engine import CoalescedAttentionEngine
from zellige_lightning.engine.routing import current_engine
from zellige_lightning.errors import EngineError


class _RecomputeHere(torch.autograd.Function):
    """Identity whose backward unpacks a saved tensor, which triggers the recomputation of the region."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        ctx.saved_tensors  # noqa: B018 - unpacking is the purpose
        return dout


class _GatherAndRecomputeHere(torch.autograd.Function):
    """As `_RecomputeHere`, for a region that is a unit of FSDP2: its parameters are gathered first, as FSDP2
    does where it meets the region's output, so that recomputing gathers nothing of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        ctx.gather = gather
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        ctx.gather(dout)
        ctx.saved_tensors  # noqa: B018 - unpacking is the purpose
        return dout, None


def checkpoint(
    function: Callable[..., Tensor], *args: Any, engine: CoalescedAttentionEngine | None = None
) -> Tensor:
    """`function(*args)` without keeping its activations; they are recomputed in backward, except the
    attention of the sequences that the engine was told to keep.

    Args:
        function: a region of the model that returns one tensor; a whole layer, or any part of one.
        engine: whose schedule the recomputation must see; default, the engine of the current step, if any.

    Returns:
        What `function` returns.

    Raises:
        EngineError: `function` is compiled. Compile around the checkpoint, not inside it.
    """
    if hasattr(function, "_torchdynamo_orig_callable") or isinstance(function, OptimizedModule):
        raise EngineError(
            "a compiled function is checkpointed",
            fix="compile what encloses the checkpoint: torch.compile(layer_that_calls_checkpoint)",
        )
    engine = engine or current_engine()

    def region(*inputs: Any) -> Tensor:
        out = function(*inputs)
        if isinstance(function, FSDPModule):
            return _GatherAndRecomputeHere.apply(out, function._get_fsdp_state()._pre_backward)
        return _RecomputeHere.apply(out)

    options: dict[str, Any] = {}
    if engine is not None and not torch.compiler.is_compiling():
        options["context_fn"] = engine.checkpoint_contexts
    elif engine is not None and engine.keep_when_compiled:
        options["context_fn"] = _keep_all_attention
    return torch.utils.checkpoint.checkpoint(region, *args, use_reentrant=False, **options)


def _keep_all_attention() -> Any:
    """Contexts for a compiled region, which only takes a plain function for them."""
    return create_selective_checkpoint_contexts([torch.ops.zellige.attention.default])
