"""Attention calls inside chosen modules reach the engine; everything else is left alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from tests.engine.mixes import Mix
from zellige_lightning.engine import AttentionRouter, CoalescedAttentionEngine
from zellige_lightning.engine.routing import current_engine, engine_of_step
from zellige_lightning.errors import EngineError
from zellige_lightning.placement import whole

HEADS, DIM = 4, 8
MIX = Mix(1, (5, 9), (whole(0), whole(0)), heads=HEADS, dim=DIM)


class SelfAttention(nn.Module):
    """As many models write it; keyword arguments go to the attention call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **kwargs: object) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **kwargs)  # type: ignore[arg-type]


class Failing(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.fixture(autouse=True)
def no_mode_stays_active() -> Iterator[None]:
    yield
    assert not _get_current_function_mode_stack()


@pytest.fixture
def router() -> AttentionRouter:
    return AttentionRouter()


@pytest.fixture
def engine() -> CoalescedAttentionEngine:
    engine = CoalescedAttentionEngine()
    engine.install(MIX.schedule(0))
    return engine


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [1, H, T, D] of the mix."""
    q, k, v = (x.transpose(0, 1)[None] for x in MIX.local(0)[:3])
    return q, k, v


def answered(engine: CoalescedAttentionEngine) -> int:
    """Attention calls that reached the engine."""
    return engine.counters.kernel_calls["forward"]


def true_output() -> Tensor:
    return torch.cat([dense.out for dense in MIX.dense]).transpose(0, 1)[None]


def test_calls_inside_attached_modules_follow_the_plan(
    router: AttentionRouter, engine: CoalescedAttentionEngine
) -> None:
    module, other = SelfAttention(), SelfAttention()
    router.attach("blocks.0.attention", module)
    with router.answered_by(engine):
        torch.testing.assert_close(module(*packed()), true_output())
        torch.testing.assert_close(other(*packed()), F.scaled_dot_product_attention(*packed()))
        assert answered(engine) == 1
    # plain attention over the packed tokens, which is right for one whole sequence only
    torch.testing.assert_close(module(*packed()), F.scaled_dot_product_attention(*packed()))
    assert answered(engine) == 1


def test_the_scale_is_kept(router: AttentionRouter, engine: CoalescedAttentionEngine) -> None:
    module = SelfAttention()
    router.attach("a", module)
    with router.answered_by(engine):
        uniform = module(*packed(), scale=0.0)
    means = [x[2].mean(0).expand(len(x[2]), HEADS, DIM) for x in MIX.tensors]
    torch.testing.assert_close(uniform[0].transpose(0, 1), torch.cat(means))


@pytest.mark.parametrize(
    "option", [{"attn_mask": torch.ones(14, 14, dtype=torch.bool)}, {"dropout_p": 0.1}, {"is_causal": True}]
)
def test_what_is_not_full_attention_is_refused(
    option: dict[str, object], router: AttentionRouter, engine: CoalescedAttentionEngine
) -> None:
    module = SelfAttention()
    router.attach("blocks.3.attn", module)
    with (
        router.answered_by(engine),
        pytest.raises(EngineError, match=r"'blocks\.3\.attn' .*mask, dropout or causality"),
    ):
        module(*packed(), **option)
    assert answered(engine) == 0


def test_cross_attention_in_a_matched_module_is_refused(
    router: AttentionRouter, engine: CoalescedAttentionEngine
) -> None:
    module = SelfAttention()
    router.attach("cross", module)
    q, k, v = packed()
    with router.answered_by(engine), pytest.raises(EngineError, match="'cross' .*not self-attention"):
        module(q, k[:, :, :7], v[:, :, :7])
    with router.answered_by(engine), pytest.raises(EngineError, match="not self-attention"):
        module(q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))
    with router.answered_by(engine), pytest.raises(EngineError, match="not self-attention"):
        module(q[0], k[0], v[0])
    with router.answered_by(engine), pytest.raises(EngineError, match="not self-attention"):
        module(q, k[0], v[0])


@pytest.mark.parametrize("training", [True, False])
def test_attention_that_cannot_be_seen_is_refused(
    training: bool, router: AttentionRouter, engine: CoalescedAttentionEngine
) -> None:
    """PyTorch's own module mixes all tokens it gets, and hides the call that does it."""
    module, x = nn.MultiheadAttention(16, 4, batch_first=True).train(training), torch.randn(1, 14, 16)
    router.attach("mha", module)
    with torch.no_grad(), router.answered_by(engine), pytest.raises(EngineError, match="'mha' .* hidden"):
        module(x, x, x, need_weights=False)
    module(x, x, x, need_weights=False)


def test_grouped_keys_are_repeated(router: AttentionRouter, engine: CoalescedAttentionEngine) -> None:
    module = SelfAttention()
    router.attach("a", module)
    q, k, v = packed()
    few_k, few_v = k[:, :2].clone().requires_grad_(), v[:, :2].clone()
    with router.answered_by(engine):
        out = module(q, few_k, few_v, enable_gqa=True)
        full = module(q, few_k.repeat_interleave(2, 1), few_v.repeat_interleave(2, 1))
        assert torch.equal(out, full)
        with pytest.raises(EngineError, match="repeat grouped"):
            module(q, few_k, few_v)
        with pytest.raises(EngineError, match="4 query heads and 3 key heads"):
            module(q, k[:, :3], v[:, :3], enable_gqa=True)
    out.sum().backward()
    assert few_k.grad is not None and few_k.grad.shape == few_k.shape


def test_copies_are_routed_too_and_name_nothing(
    router: AttentionRouter, engine: CoalescedAttentionEngine
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), SelfAttention())
    names = list(model.state_dict())
    router.attach("1", model[1])
    clone = copy.deepcopy(model)
    with router.answered_by(engine):
        torch.testing.assert_close(clone[1](*packed()), true_output())
    assert list(model.state_dict()) == list(clone.state_dict()) == names
    assert copy.deepcopy(engine) is engine  # process groups cannot be copied


def test_nested_modules_and_repeated_attachment(
    router: AttentionRouter, engine: CoalescedAttentionEngine
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SelfAttention()

        def forward(self, *qkv: Tensor) -> Tensor:
            return self.inner(*qkv) + F.scaled_dot_product_attention(*qkv)

    outer = Outer()
    router.attach("outer", outer)
    router.attach("outer.inner", outer.inner)
    with router.answered_by(engine):
        torch.testing.assert_close(outer(*packed()), 2 * true_output())
    assert answered(engine) == 2


def test_recomputation_is_routed(router: AttentionRouter, engine: CoalescedAttentionEngine) -> None:
    module = SelfAttention()
    router.attach("a", module)
    q, k, v = packed()
    q = q.clone().requires_grad_()
    with router.answered_by(engine):
        out = torch.utils.checkpoint.checkpoint(module, q, k, v, use_reentrant=False)
        out.backward(MIX.local(0)[3].transpose(0, 1)[None])
    assert answered(engine) == 2  # recomputation stops early, inside the module
    true = torch.cat([dense.dq for dense in MIX.dense])
    assert q.grad is not None
    torch.testing.assert_close(q.grad[0].transpose(0, 1), true)


def test_an_exception_leaves_no_mode_active(
    router: AttentionRouter, engine: CoalescedAttentionEngine
) -> None:
    model = nn.Sequential(nn.Identity(), Failing(ValueError("inside")))
    router.attach("model", model)
    router.attach("model.1", model[1])
    with router.answered_by(engine), pytest.raises(ValueError, match="inside"):
        model(torch.zeros(1))
    assert router.attention is None
    assert not _get_current_function_mode_stack()


def test_an_interrupt_leaves_no_mode_active_after_detach(router: AttentionRouter) -> None:
    """Forward hooks are not called for it, and a notebook goes on after it."""
    model = nn.Sequential(Failing(KeyboardInterrupt()))
    router.attach("model", model)
    router.attach("model.0", model[0])
    with pytest.raises(KeyboardInterrupt):
        model(torch.zeros(1))
    router.detach()
    assert not _get_current_function_mode_stack()


def test_a_hook_that_fails_before_ours_does_not_unbalance_the_modes(
    router: AttentionRouter, engine: CoalescedAttentionEngine
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SelfAttention()

        def forward(self, *qkv: Tensor) -> Tensor:
            try:
                self.inner(*qkv)
            except ValueError:
                return F.scaled_dot_product_attention(*qkv)
            raise AssertionError("the hook should have failed")

    def fail(*_: object) -> None:
        raise ValueError("from the user's hook")

    outer = Outer()
    outer.inner.register_forward_pre_hook(fail)
    router.attach("outer", outer)
    router.attach("outer.inner", outer.inner)
    with router.answered_by(engine):
        torch.testing.assert_close(outer(*packed()), true_output())


def test_detached_modules_are_as_before(router: AttentionRouter, engine: CoalescedAttentionEngine) -> None:
    module = SelfAttention()
    router.attach("a", module)
    router.detach()
    assert not module._forward_hooks and not module._forward_pre_hooks
    with router.answered_by(engine):
        torch.testing.assert_close(module(*packed()), F.scaled_dot_product_attention(*packed()))
    assert answered(engine) == 0


def test_the_engine_of_a_step_is_found_inside_it_alone(engine: CoalescedAttentionEngine) -> None:
    other = CoalescedAttentionEngine()
    assert current_engine() is None
    with engine_of_step(engine):
        assert current_engine() is engine
        with engine_of_step(other):
            assert current_engine() is other
        assert current_engine() is engine
    assert current_engine() is None


def test_a_schedule_is_installed_for_a_block_alone() -> None:
    engine = CoalescedAttentionEngine()
    first, second = MIX.schedule(0), Mix(1, (3,), (whole(0),)).schedule(0)
    with engine.installed(first):
        with engine.installed(second):
            assert engine.schedule is second
        assert engine.schedule is first
    assert not engine.active
