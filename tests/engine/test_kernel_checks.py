"""Calls that must be refused before any kernel runs, and views that kernels must not see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zellige_lightning.engine import kernels, varlen_attention
from zellige_lightning.engine.kernels import attention_backward, attention_forward
from zellige_lightning.engine.packing import PackedLengths, Segments
from zellige_lightning.errors import EngineError

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
        attention_backward(q, q, call["k"], call["v"], q, q[..., 0], Segments(*lengths, 1.0))


class Spy:
    """A kernel that keeps what it is given."""

    name = "spy"

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        self.seen = [q, k, v]
        return q, q[..., 0]


def self_attention(length: int) -> Segments:
    return Segments(PackedLengths((length,)), PackedLengths((length,)), 1.0)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy()
    monkeypatch.setattr(kernels, "kernel_for", lambda *_: spy)
    return spy


def test_views_that_reach_too_far_are_copied(spy: Spy) -> None:
    """A view of a packed projection may fit 32 bits by its size, while the offsets inside it do not."""
    rows, segments = 2**20, self_attention(2**20)
    q, k, v = torch.empty(rows, 3, 16, 64, device="meta").unbind(1)
    attention_forward(q, k, v, segments)
    assert len(spy.seen) == 3
    assert all(sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) < 2**31 for x in spy.seen)


def test_rows_that_begin_between_16_bytes_are_copied(spy: Spy) -> None:
    segments = self_attention(6)
    packed = torch.randn(6, 2, 40).bfloat16()
    odd, even = packed[..., 3:11], packed[..., 8:16]  # 6 bytes into a row of 80, and 16
    attention_forward(odd, even, packed[..., :8], segments)
    assert [x.is_contiguous() for x in spy.seen] == [True, False, False]
    assert torch.equal(spy.seen[0], odd)
    shifted = torch.randn(6 * 16 + 1)[1:].view(6, 2, 8)  # dense, but it starts off by 4 bytes
    attention_forward(shifted, shifted, shifted, segments)
    assert spy.seen[0].storage_offset() == 0
    assert torch.equal(spy.seen[0], shifted)


def test_rows_that_no_layout_aligns_are_not_copied(spy: Spy) -> None:
    segments, x = self_attention(6), torch.randn(6, 2, 5)
    attention_forward(x, x, x, segments)
    assert spy.seen[0] is x
