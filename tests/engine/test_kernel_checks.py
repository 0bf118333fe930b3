"""Calls that must be refused before any kernel runs, and how kernels that need a GPU are called."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from zellige_lightning.engine import kernels, varlen_attention
from zellige_lightning.engine.kernels import (
    CpuFlashKernel,
    FlashAttnKernel,
    MathKernel,
    PackedLengths,
    TorchVarlenKernel,
    attention_backward,
    attention_forward,
    kernel_for,
    require_kernel,
)
from zellige_lightning.errors import ConfigError, EngineError

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "batch axis": ({"q": torch.zeros(1, 4, 2, 8)}, "q is .Tq, H, D"),
    "keys and values differ": ({"v": torch.zeros(5, 2, 8)}, "k and v are"),
    "fewer key heads": ({"k": torch.zeros(6, 1, 8), "v": torch.zeros(6, 1, 8)}, "repeat grouped"),
    "another head dim": ({"k": torch.zeros(6, 2, 4), "v": torch.zeros(6, 2, 4)}, "got q"),
    "mixed dtypes": ({"k": torch.zeros(6, 2, 8).bfloat16()}, "one floating dtype"),
    "integers": (
        dict.fromkeys("qkv", torch.zeros(4, 2, 8, dtype=torch.int64)) | {"k_lengths": [4]},
        "floating",
    ),
    "mixed devices": ({"k": torch.zeros(6, 2, 8, device="meta")}, "device"),
    "too few queries": ({"q_lengths": [3]}, "3 queries"),
    "too many keys": ({"k_lengths": [6, 1], "q_lengths": [4, 0]}, "7 keys"),
    "another number of segments": ({"k_lengths": [6, 0]}, "1 query segments and 2 of keys"),
    "negative length": ({"q_lengths": [5, -1], "k_lengths": [6, 0]}, "negative"),
    "32-bit overflow": ({"q": torch.zeros(1, 1, 8).expand(2**28, 1, 8), "q_lengths": [2**28]}, "overflow"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_any_kernel_runs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(*_: Any) -> Any:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(kernels, "kernel_for", no_kernel)
    change, message = REFUSED[case]
    if "q" in change and "k" not in change:  # one head of keys to go with it
        heads = change["q"].shape[-2]
        change = {"k": torch.zeros(6, heads, 8), "v": torch.zeros(6, heads, 8)} | change
    call = {
        "q": torch.zeros(4, 2, 8),
        "k": torch.zeros(6, 2, 8),
        "v": torch.zeros(6, 2, 8),
        "q_lengths": [4],
        "k_lengths": [6],
    } | change
    with pytest.raises(EngineError, match=message):
        varlen_attention(**call)
    q, lengths = call["q"], [PackedLengths(tuple(call[f"{side}_lengths"])) for side in "qk"]
    with pytest.raises(EngineError, match=message):
        attention_backward(q, q, call["k"], call["v"], q, q[..., 0], *lengths, 1.0)


def test_views_that_reach_too_far_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of a packed projection may fit 32 bits by its size, while the offsets inside it do not."""
    seen: list[Tensor] = []

    class Spy:
        name = "spy"

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
            seen.extend((q, k, v))
            return q, q[..., 0]

    monkeypatch.setattr(kernels, "kernel_for", lambda *_: Spy())
    rows, lengths = 2**20, PackedLengths((2**20,))
    q, k, v = torch.empty(rows, 3, 16, 64, device="meta").unbind(1)
    attention_forward(q, k, v, lengths, lengths, 1.0)
    assert len(seen) == 3
    assert all(sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) < 2**31 for x in seen)


def test_kernels_are_chosen_by_what_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    kernel_for.cache_clear()
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert isinstance(kernel_for("cpu", dtype, 20), CpuFlashKernel)
    assert isinstance(kernel_for("cuda", torch.bfloat16, 128), TorchVarlenKernel)
    assert isinstance(kernel_for("cuda", torch.float16, 64), TorchVarlenKernel)
    assert isinstance(kernel_for("cuda", torch.float32, 64), MathKernel)
    assert isinstance(
        kernel_for("cuda", torch.bfloat16, 20), MathKernel
    )  # flash kernels want multiples of 8 ...
    assert isinstance(kernel_for("cuda", torch.bfloat16, 264), MathKernel)  # ... up to 256
    kernel_for.cache_clear()


def test_torch_varlen_arguments_fit_the_operator() -> None:
    """The meta device runs PyTorch's own argument checks and shape functions, without a GPU."""
    queries, keys = PackedLengths((4, 6)), PackedLengths((7, 2))
    q = torch.empty(10, 4, 32, dtype=torch.bfloat16, device="meta")
    k = torch.empty(9, 4, 32, dtype=torch.bfloat16, device="meta")
    out, lse = TorchVarlenKernel().forward(q, k, k, queries, keys, 0.5)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (10, 4), torch.float32)
    grads = TorchVarlenKernel().backward(out, q, k, k, out, lse, queries, keys, 0.5)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


class _Recorder:
    """Stands in for an operator: binds the arguments to its schema by name."""

    def __init__(self, operator: Any, results: tuple[Any, ...]) -> None:
        self.arguments = operator.default._schema.arguments
        self.results, self.bound = results, {}

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        positional = [a.name for a in self.arguments if not a.kwarg_only]
        self.bound = dict(zip(positional, args, strict=False)) | kwargs
        assert len(args) == len(positional)
        return self.results


def test_torch_varlen_arguments_mean_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    aten = torch.ops.aten
    lse = torch.zeros(4, 10)
    forward = _Recorder(aten._flash_attention_forward, ("out", lse, None, None, None))
    backward = _Recorder(aten._flash_attention_backward, ("dq", "dk", "dv"))
    monkeypatch.setattr(aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(aten, "_flash_attention_backward", backward)
    q, k, v, dout = (torch.full((1,), float(i)) for i in range(4))
    queries, keys = PackedLengths((4, 6)), PackedLengths((7, 2))
    out, rows_first = TorchVarlenKernel().forward(q, k, v, queries, keys, 0.5)
    assert rows_first.shape == (10, 4)
    TorchVarlenKernel().backward(dout, q, k, v, out, rows_first, queries, keys, 0.5)
    for bound in (forward.bound, backward.bound):
        assert (bound["query"], bound["key"], bound["value"], bound["scale"]) == (q, k, v, 0.5)
        assert (bound["cum_seq_q"].tolist(), bound["cum_seq_k"].tolist()) == ([0, 4, 10], [0, 7, 9])
        assert bound["cum_seq_q"].dtype == torch.int32
        assert (bound["max_q"], bound["max_k"]) == (6, 7)
        assert (bound["dropout_p"], bound["is_causal"]) == (0.0, False)
    assert (backward.bound["grad_out"], backward.bound["out"]) == (dout, "out")
    assert backward.bound["logsumexp"].shape == (4, 10)
    assert backward.bound["logsumexp"].is_contiguous()


def reference(
    q: Tensor, k: Tensor, v: Tensor, cu: tuple[Tensor, Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    lengths = [PackedLengths(tuple(x.diff().tolist())) for x in cu]
    out, lse = MathKernel().forward(q, k, v, *lengths, scale)
    return out, lse.T.contiguous()


def fill_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor, dk: Tensor, dv:
        Tensor,
    cu: tuple[Tensor, Tensor], scale: float,
) -> None:  # fmt: skip
    assert lse.is_contiguous() and dout.is_contiguous()
    lengths = [PackedLengths(tuple(x.diff().tolist())) for x in cu]
    grads = MathKernel().backward(dout, q, k, v, out, lse.T, *lengths, scale)
    for into, grad in zip((dq, dk, dv), grads, strict=True):
        into.copy_(grad)


def interface_2_6() -> ModuleType:
    """As released before 2.7: window as a pair, eight results."""
    module = ModuleType("flash_attn.flash_attn_interface")

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, return_softmax, block_table=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert (window_size, dropout_p, causal, softcap, alibi_slopes) == ((-1, -1), 0.0, False, 0.0, None)
        assert (max_seqlen_q, max_seqlen_k) == (6, 7)
        out, lse = reference(q, k, v, (cu_seqlens_q, cu_seqlens_k), softmax_scale)
        return out, q, k, v, out, lse, None, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        cu = cu_seqlens_q, cu_seqlens_k
        fill_gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu, softmax_scale)

    module._flash_attn_varlen_forward = _flash_attn_varlen_forward  # type: ignore[attr-defined]
    module._flash_attn_varlen_backward = _flash_attn_varlen_backward  # type: ignore[attr-defined]
    return module


def interface_2_7() -> ModuleType:
    """As released since 2.7: custom operators, window as two numbers, four results."""
    module = ModuleType("flash_attn.flash_attn_interface")

    @torch.library.custom_op("zellige_tests::_flash_attn_varlen_forward", mutates_args=())
    def _flash_attn_varlen_forward(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
        window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None,
        return_softmax: bool = False, block_table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        assert (window_size_left, window_size_right, dropout_p, causal) == (-1, -1, 0.0, False)
        assert (max_seqlen_q, max_seqlen_k) == (6, 7)
        out, lse = reference(q, k, v, (cu_seqlens_q, cu_seqlens_k), softmax_scale)
        return out, lse, q.new_empty(0), q.new_empty(2)

    @torch.library.custom_op("zellige_tests::_flash_attn_varlen_backward", mutates_args=("dq", "dk", "dv"))
    def _flash_attn_varlen_backward(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, dq: Tensor | None,
        dk: Tensor | None, dv: Tensor | None, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
        max_seqlen_k: int, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int,
        window_size_right: int, softcap: float, alibi_slopes: Tensor | None, deterministic: bool,
        rng_state: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert dq is not None and dk is not None and dv is not None
        cu = cu_seqlens_q, cu_seqlens_k
        fill_gradients(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu, softmax_scale)
        return softmax_lse.clone()

    module._flash_attn_varlen_forward = _flash_attn_varlen_forward  # type: ignore[attr-defined]
    module._flash_attn_varlen_backward = _flash_attn_varlen_backward  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("interface", [interface_2_6, interface_2_7])
def test_flash_attn_of_both_interfaces(interface: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface())
    kernel, math = FlashAttnKernel(), MathKernel()
    queries, keys = PackedLengths((4, 6)), PackedLengths((7, 2))
    q, k, v, dout = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (10, 9, 9, 10))
    out, lse = kernel.forward(q, k, v, queries, keys, 0.3)
    true_out, true_lse = math.forward(q, k, v, queries, keys, 0.3)
    assert torch.equal(out, true_out) and torch.equal(lse, true_lse)
    got = kernel.backward(dout, q, k, v, out, lse, queries, keys, 0.3)
    for a, b in zip(got, math.backward(dout, q, k, v, out, lse, queries, keys, 0.3), strict=True):
        assert torch.equal(a, b)


def test_a_padded_log_sum_exp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    interface = interface_2_6()
    inner = interface._flash_attn_varlen_forward

    def padded(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
               causal, window_size, softcap, alibi_slopes, return_softmax):  # type: ignore[no-untyped-def]  # fmt: skip
        *head, lse, mask, state = inner(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                        dropout_p, softmax_scale, causal, window_size, softcap,
                                        alibi_slopes, return_softmax)  # fmt: skip
        return *head, lse[None], mask, state

    interface._flash_attn_varlen_forward = padded
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    q = torch.randn(10, 2, 8)
    with pytest.raises(EngineError, match="padded"):
        FlashAttnKernel().forward(q, q[:9], q[:9], PackedLengths((4, 6)), PackedLengths((7, 2)), 0.3)


def test_a_preferred_kernel_runs_and_gives_the_same() -> None:
    q, k, v = torch.randn(3, 9, 2, 8, dtype=torch.float64).unbind()
    lengths = PackedLengths((4, 5))
    usual, _ = attention_forward(q, k, v, lengths, lengths, 1.0)
    try:
        assert isinstance(require_kernel("math", "cpu", torch.float64, 8), MathKernel)
        assert isinstance(kernel_for("cpu", torch.float64, 8), MathKernel)
        explicit, _ = attention_forward(q, k, v, lengths, lengths, 1.0)
    finally:
        assert isinstance(require_kernel("auto", "cpu", torch.float64, 8), CpuFlashKernel)
    assert (usual - explicit).abs().max() < 1e-13


@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn"])
def test_a_kernel_that_cannot_run_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.kernel = '{name}' cannot run .* CUDA"):
        require_kernel(name, "cpu", torch.bfloat16, 64)
    with pytest.raises(ConfigError, match="fp16 and bf16"):
        require_kernel(name, "cuda", torch.float32, 64)
