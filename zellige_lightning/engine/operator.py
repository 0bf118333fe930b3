"""The engine as a pair of PyTorch operators: one autograd node per attention call, opaque to the compiler.

Operators take no objects. They find their engine by its handle, and their schedule by an id in a tensor,
which autograd saves: so a backward runs under the schedule of its own forward.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

from zellige_lightning.engine.packing import accumulation_dtype
from zellige_lightning.errors import EngineError


class Engine(Protocol):
    """What the operators call."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, schedule_id: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        schedule_id: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


_handles = itertools.count()
# Weak, so that a finished run frees its engine.
_engines: weakref.WeakValueDictionary[str, Engine] = weakref.WeakValueDictionary()


def register(engine: Engine) -> str:
    """A handle by which the operators find `engine`, as long as somebody keeps it."""
    handle = f"engine-{next(_handles)}"
    _engines[handle] = engine
    return handle


def _engine(handle: str) -> Engine:
    try:
        return _engines[handle]
    except KeyError:
        raise EngineError(
            "this attention's engine is gone", fix="keep the engine until the last backward has run"
        ) from None


@torch.library.custom_op("zellige::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, schedule_id: Tensor, scale: float, handle: str
) -> tuple[Tensor, Tensor]:
    return _engine(handle).forward(q, k, v, schedule_id, scale)


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, schedule_id: Tensor, scale: float, handle: str
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))


@torch.library.custom_op("zellige::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    schedule_id: Tensor,
    scale: float,
    handle: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return _engine(handle).backward(dout, q, k, v, out, lse, schedule_id, scale)


@attention_backward.register_fake
def _(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    schedule_id: Tensor,
    scale: float,
    handle: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, schedule_id, ctx.scale, ctx.handle = inputs
    ctx.save_for_backward(q, k, v, *output, schedule_id)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, schedule_id = ctx.saved_tensors
    gradients = attention_backward(dout.contiguous(), q, k, v, out, lse, schedule_id, ctx.scale, ctx.handle)
    return *gradients, None, None, None


attention.register_autograd(_differentiate, setup_context=_save)
