"""How kernels that need a GPU are called: against stand-ins that have their real signatures, check what they
check and compute with the explicit kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.stand_ins import (
    EfficientBackward,
    EfficientForward,
    bound,
    flash_2_6,
    flash_2_7,
    flash_3_functions,
    flash_3_operators,
)
from zellige_lightning.engine import kernels, kernels_efficient
from zellige_lightning.engine.kernels import attention_backward, attention_forward
from zellige_lightning.engine.kernels_efficient import TorchEfficientKernel
from zellige_lightning.engine.kernels_packages import FlashAttn3Kernel, FlashAttnKernel
from zellige_lightning.engine.kernels_portable import MathKernel
from zellige_lightning.engine.kernels_torch import TorchVarlenKernel
from zellige_lightning.engine.packing import AttentionKernel, PackedLengths, Segments
from zellige_lightning.errors import EngineError


def test_torch_varlen_arguments_fit_the_operator() -> None:
    """The meta device runs PyTorch's own argument checks and shape functions, without a GPU."""
    queries, keys = PackedLengths((4, 6)), PackedLengths((7, 2))
    q = torch.empty(10, 4, 32, dtype=torch.bfloat16, device="meta")
    k = torch.empty(9, 4, 32, dtype=torch.bfloat16, device="meta")
    out, lse = TorchVarlenKernel().forward(q, k, k, Segments(queries, keys, 0.5))
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (10, 4), torch.float32)
    grads = TorchVarlenKernel().backward(out, q, k, k, out, lse, Segments(queries, keys, 0.5))
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


class _Recorder:
    """Stands in for an operator: keeps the arguments by the names of its schema."""

    def __init__(self, operator: Any, results: tuple[Any, ...]) -> None:
        self._operator, self.results, self.bound = operator, results, dict[str, Any]()

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.bound = bound(self._operator, args, kwargs)
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
    out, rows_first = TorchVarlenKernel().forward(q, k, v, Segments(queries, keys, 0.5))
    assert rows_first.shape == (10, 4)
    TorchVarlenKernel().backward(dout, q, k, v, out, rows_first, Segments(queries, keys, 0.5))
    for given in (forward.bound, backward.bound):
        assert (given["query"], given["key"], given["value"], given["scale"]) == (q, k, v, 0.5)
        assert (given["cum_seq_q"].tolist(), given["cum_seq_k"].tolist()) == ([0, 4, 10], [0, 7, 9])
        assert given["cum_seq_q"].dtype == torch.int32
        assert (given["max_q"], given["max_k"]) == (6, 7)
        assert (given["dropout_p"], given["is_causal"]) == (0.0, False)
    assert (backward.bound["grad_out"], backward.bound["out"]) == (dout, "out")
    assert backward.bound["logsumexp"].shape == (4, 10)
    assert backward.bound["logsumexp"].is_contiguous()


PACKAGES: dict[str, tuple[Callable[[], ModuleType], type[AttentionKernel]]] = {
    "flash-attn before 2.7": (flash_2_6, FlashAttnKernel),
    "flash-attn since 2.7": (flash_2_7, FlashAttnKernel),
    "flash-attn 3, functions": (flash_3_functions, FlashAttn3Kernel),
    "flash-attn 3, operators": (flash_3_operators, FlashAttn3Kernel),
}
LONG = (300, *(16,) * 30)  # padded to the longest: 9,300 rows of 780
SEGMENTS = {
    "ragged": ((4, 6, 1, 33), (7, 2, 40, 1)),
    "equal": ((8, 8, 8), (8, 8, 8)),
    "empty on either side": ((4, 0, 3, 0, 3), (0, 6, 5, 0, 5)),
    "one long among short ones": (LONG, LONG),
}


def installed(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    package, _, child = module.__name__.partition(".")
    if child:
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(params=PACKAGES)
def package_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AttentionKernel:
    interface, kernel = PACKAGES[request.param]
    installed(interface(), monkeypatch)
    return kernel()


@pytest.fixture
def efficient(monkeypatch: pytest.MonkeyPatch) -> EfficientForward:
    """Calls of `TorchEfficientKernel` reach stand-ins; the forward one counts them."""
    forward = EfficientForward()
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", EfficientBackward())
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", forward)
    return forward


def results(
    kernel: AttentionKernel, case: str, head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> list[Tensor]:
    """out, lse, dq, dk, dv by the engine's own way to the kernel, of views of one packed projection."""
    monkeypatch.setattr(kernels, "kernel_for", lambda *_: kernel)
    segments = Segments(*(PackedLengths(side) for side in SEGMENTS[case]), 0.3)
    num_queries, num_keys = segments.queries.total, segments.keys.total
    qkv = torch.randn(
        max(num_queries, num_keys), 3, 4, head_dim, generator=torch.Generator().manual_seed(0)
    ).to(dtype)
    q, dout = qkv[:num_queries, :, 0], qkv[:num_queries, :, 3]
    k, v = (qkv[:num_keys, :, i] for i in (1, 2))
    out, lse = attention_forward(q, k, v, segments)
    assert out.is_contiguous() and lse.is_contiguous()
    return [out, lse, *attention_backward(dout, q, k, v, out, lse, segments)]


def assert_same(got: list[Tensor], true: list[Tensor], tolerance: float) -> None:
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, true, strict=True):
        assert a.dtype == b.dtype, name
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("case", SEGMENTS)
def test_flash_attn_packages(
    case: str, package_kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = results(MathKernel(), case, 8, torch.bfloat16, monkeypatch)
    assert_same(results(package_kernel, case, 8, torch.bfloat16, monkeypatch), true, 0.0)


def test_packages_are_told_to_be_deterministic(
    package_kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-ins compare what they are told with PyTorch's switch."""
    torch.use_deterministic_algorithms(True)
    try:
        results(package_kernel, "ragged", 8, torch.bfloat16, monkeypatch)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 20, 3])
@pytest.mark.parametrize("case", SEGMENTS)
def test_memory_efficient_attention(
    case: str, head_dim: int, dtype: torch.dtype, efficient: EfficientForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = results(MathKernel(), case, head_dim, dtype, monkeypatch)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    assert_same(results(TorchEfficientKernel(), case, head_dim, dtype, monkeypatch), true, tolerance)
    assert efficient.calls == (2 if case == "one long among short ones" else 1)


def test_memory_efficient_attention_of_a_ring_part(
    efficient: EfficientForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With out and lse of all keys, gradients of some keys: what a ring asks of a kernel."""
    monkeypatch.setattr(kernels, "kernel_for", lambda *_: TorchEfficientKernel())
    q, k, v, dout = torch.randn(4, 70, 2, 8, generator=torch.Generator().manual_seed(1)).unbind()
    whole, halves = (
        PackedLengths((70,)),
        [(slice(0, 33), PackedLengths((33,))), (slice(33, 70), PackedLengths((37,)))],
    )
    segments = Segments(whole, whole, 0.3)
    out, lse = attention_forward(q, k, v, segments)
    parts = [
        attention_backward(dout, q, k[half], v[half], out, lse, Segments(whole, keys, 0.3))
        for half, keys in halves
    ]
    true = MathKernel().backward(dout, q, k, v, out, lse, segments)
    got = parts[0][0] + parts[1][0], *(torch.cat([part[i] for part in parts]) for i in (1, 2))
    for a, b in zip(got, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_packs_are_cut_where_padding_would_cost() -> None:
    """No piece takes more than about twice the memory of its own tokens, and none is cut needlessly."""
    video, images = (32760,), (256,) * 200
    for q in (video + images, images + video, (*video, *images, *video, *images), images, video):
        k = (512,) * len(q)
        pieces = kernels_efficient.cut(q, k)
        assert tuple(n for piece, _ in pieces for n in piece.lengths) == q
        assert tuple(n for _, piece in pieces for n in piece.lengths) == k
        for piece, _ in pieces:
            assert len(piece.lengths) * piece.longest <= 2 * piece.total + kernels_efficient.SPARE_ROWS
        assert len(pieces) <= 2 * q.count(32760) + 1
    assert len(kernels_efficient.cut(images, images)) == len(kernels_efficient.cut((1, 300), (1, 300))) == 1
    assert len(kernels_efficient.cut((1,) * 100_000, (1,) * 100_000)) == 2  # more than a grid holds


def test_memory_efficient_shapes_are_those_of_the_operator() -> None:
    """PyTorch's own shape function, on the meta device: what the stand-in returns."""
    q = torch.empty(1, 39, 4, 8, device="meta")
    cu = torch.empty(3, dtype=torch.int32, device="meta")
    call = (q, q, q, None, cu, cu, 33, 33, 0.0, 0, True)
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(*call, scale=0.3)
    cu = torch.tensor([0, 6, 39], dtype=torch.int32)
    call = (*(torch.zeros(1, 39, 4, 8),) * 3, None, cu, cu, *call[6:])
    mine = EfficientForward()(*call, scale=0.3)
    assert (out.shape, lse.shape, lse.dtype) == (mine[0].shape, mine[1].shape, mine[1].dtype)


def test_a_padded_log_sum_exp_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn before 2.6: `[segments, H, longest segment]`."""
    interface: Any = flash_2_6()
    inner = interface._flash_attn_varlen_forward

    def padded(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
               causal, window_size, softcap, alibi_slopes, return_softmax):  # type: ignore[no-untyped-def]  # fmt: skip
        *head, lse, mask, state = inner(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                        dropout_p, softmax_scale, causal, window_size, softcap,
                                        alibi_slopes, return_softmax)  # fmt: skip
        return *head, lse[None], mask, state

    interface._flash_attn_varlen_forward = padded
    installed(interface, monkeypatch)
    q = torch.randn(10, 2, 8).bfloat16()
    segments = Segments(PackedLengths((4, 6)), PackedLengths((7, 2)), 0.3)
    with pytest.raises(EngineError, match="padded"):
        FlashAttnKernel().forward(q, q[:9], q[:9], segments)
