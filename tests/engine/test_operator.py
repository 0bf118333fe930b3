"""The engine as a PyTorch operator: registration, shapes, derivatives, lifetime."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from tests.engine.mixes import Mix
from zellige_lightning.engine import CoalescedAttentionEngine
from zellige_lightning.errors import EngineError
from zellige_lightning.placement import whole

MIX = Mix(1, (3, 1, 4), (whole(0),) * 3, heads=2, dim=4)


def inputs(engine: CoalescedAttentionEngine) -> tuple[Tensor, Tensor, Tensor]:
    engine.install(MIX.schedule(0))
    q, k, v = (x.clone().requires_grad_() for x in MIX.local(0)[:3])
    return q, k, v


def test_gradients_by_finite_differences() -> None:
    engine = CoalescedAttentionEngine()
    assert torch.autograd.gradcheck(engine, inputs(engine))
    assert torch.autograd.gradcheck(lambda *qkv: engine(*qkv, scale=0.0), inputs(engine))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_shapes_and_registrations_are_those_that_pytorch_expects(dtype: torch.dtype) -> None:
    """PyTorch's own checks: schema, shape functions, derivative, and traced as in compilation."""
    engine = CoalescedAttentionEngine()
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in inputs(engine))
    schedule_id = engine._require_current().schedule_id
    assert schedule_id is not None
    torch.library.opcheck(torch.ops.zellige.attention.default, (q, k, v, schedule_id, 0.5, engine.handle))


def test_a_batch_that_needs_no_gradient() -> None:
    engine = CoalescedAttentionEngine()
    q, k, v = inputs(engine)
    with torch.no_grad():
        out = engine(q, k, v)
    assert not out.requires_grad
    assert torch.equal(out, engine(q, k, v))


def test_only_some_inputs_need_a_gradient() -> None:
    engine = CoalescedAttentionEngine()
    q, k, v = inputs(engine)
    engine(q.detach(), k, v.detach()).sum().backward()
    assert k.grad is not None and q.grad is None and v.grad is None


def test_a_finished_run_frees_its_engine() -> None:
    engine = CoalescedAttentionEngine()
    q, k, v = inputs(engine)
    out, gone = engine(q, k, v), weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    with pytest.raises(EngineError, match="engine is gone"):
        out.sum().backward()
