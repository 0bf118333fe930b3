"""Which kernel runs where, by faked capabilities of GPUs and faked packages."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.engine.stand_ins import flash_2_7, flash_3_operators
from zellige_lightning.engine import kernel_choice
from zellige_lightning.engine.kernel_choice import choice_in_words, kernel_for, lacks, require_kernel
from zellige_lightning.engine.kernels import attention_forward
from zellige_lightning.engine.packing import PackedLengths, Segments
from zellige_lightning.errors import ConfigError

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
FLASH_2, FLASH_3 = "flash_attn.flash_attn_interface", "flash_attn_interface"
BOTH = frozenset({FLASH_2, FLASH_3})


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """No choice outlives its test."""
    kernel_for.cache_clear()
    yield
    kernel_choice.prefer_kernel("auto")


def pretend(monkeypatch: pytest.MonkeyPatch, capability: int, packages: frozenset[str] = frozenset()) -> None:
    """A GPU of that capability, PyTorch built with flash attention, and those packages."""
    present = {FLASH_2: flash_2_7, FLASH_3: flash_3_operators}
    for name in BOTH:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], None)
        monkeypatch.setitem(sys.modules, name, None)
    for name in packages:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], ModuleType(name))
        monkeypatch.setitem(sys.modules, name, present[name]())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: divmod(capability, 10))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


@pytest.mark.parametrize(
    ("capability", "packages", "dtype", "head_dim", "chosen"),
    [
        (90, BOTH, BF16, 128, "flash_attn_3"),
        (90, frozenset({FLASH_2}), BF16, 128, "flash_attn"),
        (90, frozenset(), BF16, 128, "torch_varlen"),
        (80, BOTH, BF16, 128, "flash_attn"),  # version 3 is for Hopper alone
        (100, BOTH, FP16, 64, "flash_attn"),
        (120, frozenset(), BF16, 64, "torch_varlen"),
        (90, BOTH, FP32, 128, "torch_efficient"),
        (80, frozenset(), FP32, 64, "torch_efficient"),
        (75, BOTH, FP16, 64, "torch_efficient"),
        (75, BOTH, FP32, 64, "torch_efficient"),
        (75, BOTH, BF16, 64, "math"),
        (90, BOTH, BF16, 20, "torch_efficient"),  # flash kernels want multiples of 8 ...
        (90, BOTH, BF16, 264, "torch_efficient"),  # ... up to 256
        (80, frozenset(), BF16, 224, "torch_varlen"),
        (89, BOTH, BF16, 224, "torch_efficient"),
        (89, frozenset(), BF16, 256, "torch_varlen"),
        (90, BOTH, FP64, 64, "math"),
    ],
)
def test_the_best_kernel_that_can(
    capability: int,
    packages: frozenset[str],
    dtype: torch.dtype,
    head_dim: int,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, capability, packages)
    assert kernel_for("cuda", dtype, head_dim).name == chosen


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, FP16], ids=str)
def test_cpus_have_their_own(dtype: torch.dtype) -> None:
    assert kernel_for("cpu", dtype, 20).name == "cpu_flash"
    assert choice_in_words("cpu", dtype, 20) == f"cpu_flash (cpu, {dtype}, head dim 20)"


def test_a_build_without_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 90)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert kernel_for("cuda", BF16, 64).name == "torch_efficient"
    assert "this build of PyTorch" in lacks("torch_varlen", "cuda", BF16, 64)


def test_why_a_better_kernel_does_not_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 80, frozenset({FLASH_3}))
    words = choice_in_words("cuda", BF16, 64)
    assert words == (
        "torch_varlen (cuda, torch.bfloat16, head dim 64); not flash_attn_3: it is written for Hopper GPUs"
        " (compute capability 9.0); not flash_attn: flash-attn is not installed"
    )
    require_kernel("torch_efficient", "cuda", BF16, 64)
    assert choice_in_words("cuda", BF16, 64) == "torch_efficient (cuda, torch.bfloat16, head dim 64)"


def broken_build(name: str) -> Any:
    raise ImportError("undefined symbol: of another PyTorch")


def test_a_package_that_cannot_be_imported_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 90, frozenset({FLASH_2}))
    inner = importlib.import_module
    monkeypatch.setattr(
        importlib, "import_module", lambda name: broken_build(name) if name == FLASH_3 else inner(name)
    )
    assert kernel_for("cuda", BF16, 64).name == "flash_attn"
    assert "flash-attn 3 cannot be imported: undefined symbol" in lacks("flash_attn_3", "cuda", BF16, 64)


def test_a_release_without_packed_segments_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first flash-attn 3 had another function for them."""
    pretend(monkeypatch, 90, BOTH)

    def _flash_attn_forward(q, k, v, softmax_scale, causal):  # type: ignore[no-untyped-def]
        raise AssertionError("called")

    monkeypatch.setattr(sys.modules[FLASH_3], "_flash_attn_forward", _flash_attn_forward)
    assert kernel_for("cuda", BF16, 64).name == "flash_attn"
    assert "takes no packed segments" in lacks("flash_attn_3", "cuda", BF16, 64)


def test_version_4_alone_is_not_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """It installs a package of the same name, without that module."""
    pretend(monkeypatch, 90)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert kernel_for("cuda", BF16, 64).name == "torch_varlen"


def test_a_preferred_kernel_runs_and_gives_the_same() -> None:
    q, k, v = torch.randn(3, 9, 2, 8, dtype=FP64).unbind()
    lengths = PackedLengths((4, 5))
    segments = Segments(lengths, lengths, 1.0)
    usual, _ = attention_forward(q, k, v, segments)
    assert require_kernel("math", "cpu", FP64, 8).name == kernel_for("cpu", FP64, 8).name == "math"
    explicit, _ = attention_forward(q, k, v, segments)
    assert require_kernel("auto", "cpu", FP64, 8).name == "cpu_flash"
    assert (usual - explicit).abs().max() < 1e-13


@pytest.mark.parametrize("name", ["torch_varlen", "flash_attn", "flash_attn_3", "torch_efficient"])
def test_a_kernel_that_cannot_run_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"engine.kernel = '{name}' cannot run .* CUDA"):
        require_kernel(name, "cpu", BF16, 64)
    with pytest.raises(ConfigError, match="fp16"):
        require_kernel(name, "cuda", FP64, 64)


def test_a_gpu_of_the_wrong_kind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 75, BOTH)
    for name in ("flash_attn", "torch_varlen"):
        with pytest.raises(ConfigError, match="Ampere"):
            require_kernel(name, "cuda", FP16, 64)
    pretend(monkeypatch, 80, BOTH)
    with pytest.raises(ConfigError, match="Hopper"):
        require_kernel("flash_attn_3", "cuda", FP16, 64)
