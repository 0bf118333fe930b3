"""The engine's whole pack and varlen cross-attention against the bare kernel calls that they make, with the
machine's own ceilings beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_common import Setup, elapsed_ms, medians_ms, random_tensor, rounded
from torch import Tensor

from zellige_lightning.engine import CoalescedAttentionEngine, varlen_attention
from zellige_lightning.engine.kernel_choice import kernel_for
from zellige_lightning.engine.packing import PackedLengths, Segments
from zellige_lightning.placement import build_schedule, whole

Variants = dict[str, Callable[[], Any]]


def packs(setup: Setup) -> dict[str, tuple[int, ...]]:
    if setup.tiny:
        return {"images 256p": (16,) * 4, "mix": (96, *(24,) * 3, *(4,) * 6)}
    return {
        "images 256p": (256,) * 64,
        "images 720p": (3600,) * 8,
        "500 tiny": tuple(1 + 7 * i % 64 for i in range(500)),
        "one video": (32760,),
        "mix": (32760, *(3600,) * 4, *(1560,) * 6, *(256,) * 16),
    }


def check(setup: Setup) -> None:
    """First the ceilings, then a row for each pack and each pack's cross-attention."""
    setup.record(ceilings(setup))
    for name, lengths in packs(setup).items():
        if setup.remaining_s > 5.0:
            setup.record(compared("self", name, lengths, lengths, setup))
        if setup.remaining_s > 5.0:
            text = (setup.config.text_len,) * len(lengths)
            setup.record(compared("cross", name, lengths, text, setup))


def ceilings(setup: Setup) -> dict[str, Any]:
    """bf16 matrix product on random data, and a device-to-device copy counting bytes read and written."""
    side, count = (256, 1 << 16) if setup.tiny else (8192, 1 << 30)
    a, b = (random_tensor((side, side), torch.bfloat16, setup, seed) for seed in (0, 1))
    source = torch.ones(count, dtype=torch.float32, device=setup.device)
    target = torch.empty_like(source)
    times = medians_ms({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, setup.device, 10)
    return {
        "ceilings": True,
        "matmul_tflops": rounded(2 * side**3 / times["product"] / 1e9),
        "copy_gb_per_s": rounded(8 * count / times["copy"] / 1e6),
    }


def compared(
    kind: str, name: str, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...], setup: Setup
) -> dict[str, Any]:
    """Times of forward and of forward with backward, ours and the kernel's."""
    heads, dim = setup.config.num_heads, setup.config.head_dim
    shapes = [(sum(n), heads, dim) for n in (q_lengths, k_lengths, k_lengths, q_lengths)]
    q, k, v, dout = (random_tensor(s, torch.bfloat16, setup, seed) for seed, s in enumerate(shapes))
    forward, both = bare(q, k, v, dout, q_lengths, k_lengths)
    ours_forward, ours_both = ours(kind, q, k, v, dout, q_lengths, k_lengths)
    variants: Variants = {"kernel_forward": forward, "ours_forward": ours_forward, "kernel": both}
    variants["ours"] = ours_both
    if kind == "self" and len(q_lengths) == 1:
        variants["plain_sdpa"] = plain(q, k, v, dout)
    repeats = repeats_within(setup, variants)
    times = medians_ms(variants, setup.device, repeats)
    flops = 4 * heads * dim * sum(a * b for a, b in zip(q_lengths, k_lengths, strict=True))
    return {
        "attention": kind,
        "pack": name,
        "tokens": sum(q_lengths),
        "segments": len(q_lengths),
        "repeats": repeats,
        "kernel_name": kernel_for(q.device.type, q.dtype, dim).name,
        **{f"{variant}_ms": rounded(ms) for variant, ms in times.items()},
        "forward_overhead_pct": rounded(100 * (times["ours_forward"] / times["kernel_forward"] - 1), 3),
        "overhead_pct": rounded(100 * (times["ours"] / times["kernel"] - 1), 3),
        # the backward of flash attention is 2.5 forwards
        "kernel_tflops": rounded(3.5 * flops / times["kernel"] / 1e9),
        "ours_tflops": rounded(3.5 * flops / times["ours"] / 1e9),
    }


def repeats_within(setup: Setup, variants: Variants) -> int:
    """As many as fit a tenth of the time that is left; the first call of each also warms up."""
    once = sum(elapsed_ms(run, setup.device) for run in variants.values())
    most = setup.repeats if setup.tiny else 20
    return max(2, min(most, int(100 * setup.remaining_s / max(once, 1e-3))))


def bare(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, q_lengths: tuple[int, ...], k_lengths: tuple[int, ...]
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The kernel alone: no autograd, no checks."""
    kernel = kernel_for(q.device.type, q.dtype, q.shape[-1])
    segments = Segments(PackedLengths(q_lengths), PackedLengths(k_lengths), q.shape[-1] ** -0.5)

    def both() -> None:
        out, lse = kernel.forward(q, k, v, segments)
        kernel.backward(dout, q, k, v, out, lse, segments)

    return lambda: kernel.forward(q, k, v, segments), both


def ours(
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    q_lengths: tuple[int, ...],
    k_lengths: tuple[int, ...],
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What a model calls: the engine with a schedule installed, or varlen cross-attention."""
    engine = CoalescedAttentionEngine()
    engine.install(build_schedule([whole(0)] * len(q_lengths), list(q_lengths), 0, 1))
    # As models pass them: host tensors, made once per step.
    lengths = torch.tensor(q_lengths), torch.tensor(k_lengths)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def attend() -> Tensor:
        q, k, v = leaves
        return engine(q, k, v) if kind == "self" else varlen_attention(q, k, v, *lengths)

    def forward() -> None:
        with torch.no_grad():
            attend()

    return forward, lambda: torch.autograd.grad(attend(), leaves, dout)


def plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Callable[[], Any]:
    """PyTorch's attention on the one sequence, with the backend that it chooses."""
    query, key, value = (x.transpose(0, 1)[None].detach().requires_grad_() for x in (q, k, v))
    gradient = dout.transpose(0, 1)[None]

    def both() -> None:
        out = F.scaled_dot_product_attention(query, key, value)
        torch.autograd.grad(out, (query, key, value), gradient)

    return both
