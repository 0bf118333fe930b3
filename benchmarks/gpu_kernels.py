"""Every attention kernel behind the engine's contract against the fp64 oracle.

A kernel passes a case if its outputs and gradients deviate from the oracle by at most twice what the dense
computation in the same precision does (or by no more than ROUNDING), and its lse by less than LSE_LIMIT. It
runs through the same checks and the same treatment of empty segments as in training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from gpu_common import AbsentError, Setup, random_tensor, rounded, synchronize
from gpu_reference import Dense, dense_attention, l2_error
from torch import Tensor

from zellige_lightning.engine import kernels
from zellige_lightning.engine.kernel_choice import BY_NAME, lacks
from zellige_lightning.engine.packing import AttentionKernel, PackedLengths, Segments

FACTOR = 2.0
ROUNDING = {torch.float32: 5e-6}  # relative, in L2: products of three TF32 parts are not the dense ones
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LSE_LIMIT = 1e-3  # absolute: an lse that is off by it scales probabilities by 1.001
HEADS = 3  # unlike any length or head dim, so that exchanged axes show


@dataclass(frozen=True)
class Case:
    """Segment lengths. `strided` inputs are views of one packed projection, as models pass them."""

    name: str
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    strided: bool = False


def cases(tiny: bool) -> list[Case]:
    """From what training brings; 500 segments and 8,192 tokens (300 in a rehearsal)."""
    mixed = (1, 64, 7, 129, 300, 2)
    many = tuple(1 + 7 * i % 16 for i in range(40 if tiny else 500))
    long = (300 if tiny else 8192,)
    return [
        Case("mixed", mixed, mixed),
        Case("mixed, strided", mixed, mixed, strided=True),
        Case("zero-length", (0, 33, 17, 0, 64), (0, 33, 0, 5, 64)),
        Case("tiny segments", many, many),
        Case("long", long, long),
        Case("cross", mixed, (16,) * len(mixed) if tiny else (512,) * len(mixed)),
    ]


def check(setup: Setup) -> None:
    """All cases of the kernel that the unit is named after. Raises: AbsentError where it does not exist."""
    name = setup.unit.removeprefix("kernel-")
    dtypes = dtypes_of(name, setup)
    with kernel_named(name):
        for dtype in dtypes:
            for head_dim in (64, 128):
                for number, case in enumerate(cases(setup.tiny)):
                    if setup.remaining_s > 1.0:
                        setup.record(check_case(case, head_dim, dtype, setup, number))
        for case in cases(setup.tiny):
            if case.name in ("mixed", "tiny segments", "long"):
                setup.record(check_repeatable(case, dtypes[0], setup))


def dtypes_of(name: str, setup: Setup) -> list[torch.dtype]:
    """Those that the kernel takes here. Raises: AbsentError if there are none."""
    home = name if name in BY_NAME else "torch_varlen"
    reasons = {dtype: lacks(home, setup.device_name, dtype, 64) for dtype in DTYPES}
    if all(reasons.values()):
        raise AbsentError("; ".join(dict.fromkeys(reasons.values())))
    return [dtype for dtype, reason in reasons.items() if not reason]


@contextmanager
def kernel_named(name: str) -> Iterator[None]:
    """Make the kernel the one that the engine uses, for the duration of a block."""
    with (
        _activated(name) as kernel,
        mock.patch.object(kernels, "kernel_for", return_value=kernel),
    ):
        yield


@contextmanager
def _activated(name: str) -> Iterator[AttentionKernel]:
    if name in BY_NAME:
        yield BY_NAME[name]()
    else:
        yield from _through_registry(name.upper())


def _through_registry(implementation: str) -> Iterator[AttentionKernel]:
    """FA3 or FA4 behind PyTorch's own operators."""
    attention: Any = torch.nn.attention
    if not hasattr(attention, "activate_flash_attention_impl"):
        raise AbsentError(f"PyTorch {torch.__version__} cannot activate {implementation}")
    try:
        attention.activate_flash_attention_impl(implementation)
    except (ImportError, RuntimeError, ValueError) as reason:
        raise AbsentError(f"PyTorch could not activate {implementation}: {reason}") from reason
    try:
        yield BY_NAME["torch_varlen"]()
    finally:
        attention.restore_flash_attention_impl()


def make_inputs(case: Case, head_dim: int, dtype: torch.dtype, setup: Setup, seed: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    rows, keys = sum(case.q_lengths), sum(case.k_lengths)
    if case.strided:
        packed = random_tensor((rows, HEADS, 3, head_dim), dtype, setup, seed)
        qkv = list(packed.unbind(dim=2))
    else:
        shapes = [(n, HEADS, head_dim) for n in (rows, keys, keys)]
        qkv = [random_tensor(shape, dtype, setup, seed + i) for i, shape in enumerate(shapes)]
    return [*qkv, random_tensor((rows, HEADS, head_dim), dtype, setup, seed + 9)]


def run_kernel(case: Case, inputs: list[Tensor]) -> Dense:
    """Forward and backward through the engine's entry to the kernel that is active."""
    q, k, v, dout = inputs
    lengths = PackedLengths(case.q_lengths), PackedLengths(case.k_lengths)
    segments = Segments(*lengths, q.shape[-1] ** -0.5)
    poison(q)
    out, lse = kernels.attention_forward(q, k, v, segments)
    poison(q)
    return Dense(out, lse, *kernels.attention_backward(dout, q, k, v, out, lse, segments))


def poison(like: Tensor) -> None:
    """Fill memory that is handed out next with NaN, so that rows nobody writes show."""
    blocks = [torch.full_like(like, torch.nan) for _ in range(6)]
    blocks += [torch.full(like.shape[:2], torch.nan, dtype=torch.float32, device=like.device)]


def check_case(case: Case, head_dim: int, dtype: torch.dtype, setup: Setup, seed: int) -> dict[str, Any]:
    """The row of a case. What the kernel refuses is wrong, and costs no other case."""
    inputs = make_inputs(case, head_dim, dtype, setup, seed)
    row: dict[str, Any] = {
        "kernel": setup.unit.removeprefix("kernel-"),
        "case": case.name,
        "segments": len(case.q_lengths),
        "head_dim": head_dim,
        "dtype": str(dtype).removeprefix("torch."),
    }
    try:
        got = run_kernel(case, inputs)
    except RuntimeError as refusal:
        synchronize(setup.device)  # raises again where the device is lost, which ends the unit
        return row | {"refused": str(refusal)[:300], "error_over_dense_error": {}, "right": False}
    return row | judged(got, case, inputs, dtype)


def judged(got: Dense, case: Case, inputs: list[Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Errors over those of the dense computation. None stands for a value that is not finite."""
    true = dense_attention(inputs, case.q_lengths, case.k_lengths, torch.float64)
    dense = dense_attention(inputs, case.q_lengths, case.k_lengths, dtype)
    names = [name for name in true._fields if name != "lse"]
    errors, limits = (
        {name: l2_error(getattr(x, name), getattr(true, name)) for name in names} for x in (got, dense)
    )
    layout = got.lse.shape == true.lse.shape and got.lse.dtype == torch.float32
    lse_error = largest_lse_error(got.lse, true.lse) if layout else math.inf
    exact = all(errors[name] <= max(FACTOR * limits[name], ROUNDING.get(dtype, 0.0)) for name in names)
    return {
        "error_over_dense_error": {name: _finite(errors[name] / limits[name]) for name in names},
        "lse_layout": layout,
        "lse_error": _finite(lse_error),
        "right": layout and lse_error < LSE_LIMIT and exact,
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return rounded(value, 3) if math.isfinite(value) else None


def largest_lse_error(got: Tensor, true: Tensor) -> float:
    """Over rows with keys; infinite where -inf is not where it belongs."""
    finite = true.isfinite()
    if not bool((got.isneginf() == true.isneginf()).all()):
        return math.inf
    return float((got.double() - true)[finite].abs().max())


def check_repeatable(case: Case, dtype: torch.dtype, setup: Setup) -> dict[str, Any]:
    """Whether two runs agree to the last bit, as they are and under PyTorch's deterministic mode."""
    inputs = make_inputs(case, 128, dtype, setup, seed=0)
    row: dict[str, Any] = {
        "kernel": setup.unit.removeprefix("kernel-"),
        "repeatability": case.name,
    }
    row["by_default"] = _verdict(case, inputs)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        row["deterministic_mode"] = _verdict(case, inputs)
    except RuntimeError as refusal:
        if "deterministic" not in str(refusal):
            raise
        row["deterministic_mode"] = f"unsupported: {str(refusal)[:200]}"
    finally:
        torch.use_deterministic_algorithms(before)
    return row


def _verdict(case: Case, inputs: list[Tensor]) -> str:
    first = run_kernel(case, inputs)
    same = all(
        all(torch.equal(a, b) for a, b in zip(first, run_kernel(case, inputs), strict=True)) for _ in range(2)
    )
    return "bitwise equal" if same else "differs"
