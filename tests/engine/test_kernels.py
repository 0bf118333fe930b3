"""Every kernel that runs on CPU against attention from its definition: outputs, lse, and all three
gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.oracle import dense_attention, l2_error
from zellige_lightning.engine import kernels, varlen_attention
from zellige_lightning.engine.kernels import attention_backward, attention_forward
from zellige_lightning.engine.kernels_portable import CpuFlashKernel, MathKernel
from zellige_lightning.engine.packing import PackedLengths, Segments

HEADS, DIM = 3, 20
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 8e-4}
LSE_TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}
SEGMENTS = {
    "one": [(7, 7)],
    "one token": [(1, 1)],
    "ragged": [(5, 5), (1, 1), (64, 64), (33, 33)],
    "runs of equal lengths": [(8, 8)] * 3 + [(3, 3)] * 2 + [(8, 8)],
    "cross": [(5, 9), (12, 1), (1, 40), (1, 40)],
    "long": [(517, 300)],
    "empty on both sides": [(4, 4), (0, 0), (3, 3), (0, 0)],
    "queries without keys": [(4, 0), (3, 5), (2, 0)],
    "keys without queries": [(0, 6), (3, 5), (0, 1)],
    "empty on either side": [(4, 0), (0, 6), (3, 5), (0, 0), (3, 5)],
    "only queries": [(4, 0)],
    "only keys": [(0, 4)],
    "nothing": [(0, 0)],
    "no segment": [],
}


@pytest.fixture(params=[CpuFlashKernel, MathKernel], ids=lambda kernel: kernel.name)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(kernels, "kernel_for", lambda *_: request.param())
    return request.param


def draw(
    segments: list[tuple[int, int]], dtype: torch.dtype
) -> tuple[list[Tensor], PackedLengths, PackedLengths]:
    """q, k, v, dout and the lengths of both sides."""
    lengths = [PackedLengths(tuple(pair[side] for pair in segments)) for side in (0, 1)]
    generator = torch.Generator().manual_seed(len(segments))
    rows = lengths[0].total, lengths[1].total, lengths[1].total, lengths[0].total
    tensors = [torch.randn(n, HEADS, DIM, generator=generator, dtype=torch.float64).to(dtype) for n in rows]
    return tensors, lengths[0], lengths[1]


def by_segment(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *lengths: PackedLengths, scale: float
) -> list[Tensor]:
    """out, lse, dq, dk, dv of the definition, segment by segment."""
    ql, kl = (x.lengths for x in lengths)
    parts = zip(q.split(ql), k.split(kl), v.split(kl), dout.split(ql), strict=True)
    dense = [dense_attention(*part, scale=scale) for part in parts]
    if not dense:
        return [q, q[..., 0], q, k, v]
    return [torch.cat(x) for x in zip(*dense, strict=True)]


def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *lengths: PackedLengths, scale: float) -> list[Tensor]:
    out, lse = attention_forward(q, k, v, Segments(*lengths, scale))
    return [out, lse, *attention_backward(dout, q, k, v, out, lse, Segments(*lengths, scale))]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", SEGMENTS)
def test_against_the_definition(kernel: Any, case: str, dtype: torch.dtype) -> None:
    tensors, *lengths = draw(SEGMENTS[case], dtype)
    got = run(*tensors, *lengths, scale=0.3)
    true = by_segment(*tensors, *lengths, scale=0.3)
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, true, strict=True):
        assert a.shape == b.shape, name
        if name == "lse":
            assert a.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=LSE_TOLERANCE[dtype])
        else:
            assert a.dtype == dtype, name
            assert l2_error(a, b.double()) <= TOLERANCE[dtype], name


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded heads": lambda x: x[:, :1].expand(-1, HEADS, -1),
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "head dim not dense": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "every other column": lambda x: torch.stack((x, x), dim=-1)[..., 0],
}


@pytest.mark.parametrize("case", ["ragged", "runs of equal lengths", "empty on either side"])
@pytest.mark.parametrize("view", STRIDED)
def test_strides_change_nothing(kernel: Any, view: str, case: str) -> None:
    tensors, *lengths = draw(SEGMENTS[case], torch.float64)
    strided = [STRIDED[view](x) for x in tensors]
    assert not all(x.is_contiguous() for x in strided)
    got = run(*strided, *lengths, scale=0.3)
    for a, b in zip(got, run(*(x.contiguous() for x in strided), *lengths, scale=0.3), strict=True):
        assert torch.equal(a, b)


def test_views_of_one_packed_projection(kernel: Any) -> None:
    lengths = PackedLengths((5, 8, 8))
    qkv = torch.randn(21, HEADS, 3 * DIM, dtype=torch.float64)
    q, k, v = qkv.split(DIM, dim=-1)
    dout = torch.randn(DIM, dtype=torch.float64).expand(
        21, HEADS, DIM
    )  # as `(out * w).sum().backward()` makes it
    got = run(q, k, v, dout, lengths, lengths, scale=0.2)
    true = by_segment(q, k, v, dout, lengths, lengths, scale=0.2)
    assert max(l2_error(a, b) for a, b in zip(got, true, strict=True)) < 1e-13


def test_backward_of_a_ring_part(kernel: Any) -> None:
    """With the out and lse of all keys, the gradients of a part of them are exact, and dq is a part of the
    sum."""
    (q, k, v, dout), queries, _ = draw([(13, 30)], torch.float64)
    true = dense_attention(q, k, v, dout, scale=0.3)
    parts = (slice(0, 11), slice(11, 30))
    got = [
        attention_backward(dout, q, k[part], v[part], true.out, true.lse, Segments(queries, keys, 0.3))
        for part, keys in zip(parts, (PackedLengths((11,)), PackedLengths((19,))), strict=True)
    ]
    torch.testing.assert_close(got[0][0] + got[1][0], true.dq, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.cat([x[1] for x in got]), true.dk, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.cat([x[2] for x in got]), true.dv, rtol=0, atol=1e-13)


def test_large_scores_stay_finite(kernel: Any) -> None:
    (q, k, v, dout), *lengths = draw([(9, 9)], torch.float32)
    got = run(q * 100, k * 100, v, dout, *lengths, scale=1.0)
    true = by_segment(q * 100, k * 100, v, dout, *lengths, scale=1.0)
    assert all(bool(x.isfinite().all()) for x in got)
    assert l2_error(got[0], true[0]) < 1e-3


@pytest.mark.parametrize("lengths", [([5, 0, 3], [4, 2, 1]), ([2, 6], [0, 7]), ([0, 0, 8], [0, 3, 4])])
def test_varlen_attention_is_differentiable(lengths: tuple[list[int], list[int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(lengths[side]), 2, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for side in (0, 1, 1)
    )
    assert torch.autograd.gradcheck(lambda *x: varlen_attention(*x, *lengths), (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: varlen_attention(*x, *lengths, scale=0.0), (q, k, v))


def test_scale_zero_means_zero() -> None:
    q, k, v = (torch.randn(3, 1, 4) for _ in range(3))
    torch.testing.assert_close(varlen_attention(q, k, v, [3], [3], scale=0.0), v.mean(0).expand(3, 1, 4))
