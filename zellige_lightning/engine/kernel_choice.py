"""Which kernel runs: the best one that takes the tensors, or the one that `engine.kernel` names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch

from zellige_lightning.engine.kernels_efficient import TorchEfficientKernel
from zellige_lightning.engine.kernels_packages import FlashAttn3Kernel, FlashAttnKernel
from zellige_lightning.engine.kernels_portable import CpuFlashKernel, MathKernel
from zellige_lightning.engine.kernels_torch import TorchVarlenKernel
from zellige_lightning.engine.packing import AttentionKernel, TensorKind
from zellige_lightning.errors import ConfigError

BY_NAME: Mapping[str, type[AttentionKernel]] = MappingProxyType(  # best first
    {
        "cpu_flash": CpuFlashKernel,
        "flash_attn_3": FlashAttn3Kernel,
        "flash_attn": FlashAttnKernel,
        "torch_varlen": TorchVarlenKernel,
        "torch_efficient": TorchEfficientKernel,
        "math": MathKernel,
    }
)
KERNELS = ("auto", *BY_NAME)
_wanted = "auto"


def prefer_kernel(name: str) -> None:
    """From now on, in this process, use that kernel for all tensors that it takes; `auto` lets capability
    choose."""
    global _wanted
    _wanted = name
    kernel_for.cache_clear()


@cache
def kernel_for(device_type: str, dtype: torch.dtype, head_dim: int) -> AttentionKernel:
    """The kernel for tensors of that kind: the preferred one where it takes them, else the best that does."""
    names = BY_NAME if _wanted == "auto" else (_wanted, *BY_NAME)
    return BY_NAME[next(name for name in names if not lacks(name, device_type, dtype, head_dim))]()


def lacks(name: str, device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """Why the kernel cannot take such tensors; empty where it can."""
    return BY_NAME[name].lacks(TensorKind(device_type, dtype, head_dim, _capability(device_type)))


def _capability(device_type: str) -> int:
    """Of the GPU that the process uses."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def require_kernel(name: str, device_type: str, dtype: torch.dtype, head_dim: int) -> AttentionKernel:
    """`prefer_kernel`, where it takes the model's tensors; returns the kernel that they get.

    Raises:
        ConfigError: it does not.
    """
    if name != "auto" and (reason := lacks(name, device_type, dtype, head_dim)):
        raise ConfigError(
            f"engine.kernel = {name!r} cannot run {dtype} and head dim {head_dim} on {device_type}: {reason}",
            fix="engine.kernel=auto",
        )
    prefer_kernel(name)
    return kernel_for(device_type, dtype, head_dim)


def choice_in_words(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """The kernel that such tensors get, and what keeps the better ones for GPUs from them."""
    chosen = kernel_for(device_type, dtype, head_dim).name
    passed: dict[str, list[str]] = {}
    if device_type == "cuda" and chosen != _wanted:
        for name in list(BY_NAME)[1 : list(BY_NAME).index(chosen)]:  # the first one is for CPUs
            passed.setdefault(lacks(name, device_type, dtype, head_dim), []).append(name)
    reasons = [f"not {', '.join(names)}: {reason}" for reason, names in passed.items()]
    return "; ".join([f"{chosen} ({device_type}, {dtype}, head dim {head_dim})", *reasons])
