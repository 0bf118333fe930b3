"""The flash-attn packages, versions 2 and 3, where they are installed; shapes as in `packing.py`.

Releases differ in their parameters, and version strings do not compare as numbers: functions are called by
the names of the parameters that they have.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zellige_lightning.engine.kernels_torch import flash_2_lacks
from zellige_lightning.engine.packing import PackedLengths, TensorKind
from zellige_lightning.errors import EngineError

HOPPER = 90
FLASH_2, FLASH_3 = "flash_attn.flash_attn_interface", "flash_attn_interface"


class FlashAttnKernel:
    """The flash-attn package (version 2)."""

    name = "flash_attn"

    def __init__(self) -> None:
        interface: Any = importlib.import_module(FLASH_2)
        self._forward = _ByName(interface._flash_attn_varlen_forward)
        self._backward = _ByName(interface._flash_attn_varlen_backward)

    @staticmethod
    def lacks(kind: TensorKind) -> str:
        if reason := flash_2_lacks(kind):
            return reason
        return _package_lacks(
            FLASH_2, "flash-attn", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"
        )

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_lengths: PackedLengths,
        k_lengths: PackedLengths,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        common = _common(q, q_lengths, k_lengths, scale)
        # Four results (out, lse, S_dmask, rng_state), or eight in older releases (out, q, k, v, padded
        # out, lse, ...).
        result = self._forward(q=q, k=k, v=v, return_softmax=False, **common)
        return result[0], _tokens_first(result[1] if len(result) == 4 else result[5], q)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_lengths: PackedLengths,
        k_lengths: PackedLengths,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        common = _common(q, q_lengths, k_lengths, scale)
        return _differentiate(self._backward, common, dout, q, k, v, out, lse)


class FlashAttn3Kernel:
    """The flash-attn package for Hopper (version 3). Its own pair of functions is called, not its autograd,
    which has no deterministic backward."""

    name = "flash_attn_3"

    def __init__(self) -> None:
        interface: Any = importlib.import_module(FLASH_3)
        self._forward = _ByName(interface._flash_attn_forward)
        self._backward = _ByName(interface._flash_attn_backward)

    @staticmethod
    def lacks(kind: TensorKind) -> str:
        if reason := flash_2_lacks(kind):  # what it takes is the same
            return reason
        if kind.capability != HOPPER or torch.version.hip is not None:
            return "it is written for Hopper GPUs (compute capability 9.0)"
        return _package_lacks(FLASH_3, "flash-attn 3", "_flash_attn_forward", "_flash_attn_backward")

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_lengths: PackedLengths,
        k_lengths: PackedLengths,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        common = _common(q, q_lengths, k_lengths, scale)
        # Keys in one part: partial results of several would be added in another precision and order.
        out, lse, *_ = self._forward(q=q, k=k, v=v, num_splits=1, **common)
        return out, _tokens_first(lse, q)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        q_lengths: PackedLengths,
        k_lengths: PackedLengths,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        common = _common(q, q_lengths, k_lengths, scale)
        return _differentiate(self._backward, common, dout, q, k, v, out, lse)


class _ByName:
    """A function whose parameters differ from release to release: it gets the arguments that it knows, and
    None for any other parameter that has no default."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._required = function, _parameters(function)

    def __call__(self, **arguments: Any) -> Any:
        given = {
            name: arguments.get(name)
            for name, required in self._required.items()
            if required or name in arguments
        }
        return self._function(**given)


def _parameters(function: Any) -> Mapping[str, bool]:
    """Whether each parameter must be given. A custom operator, as flash-attn uses since 2.7, tells by its
    schema."""
    if (operator := getattr(function, "_opoverload", None)) is not None:
        return {argument.name: not argument.has_default_value() for argument in operator._schema.arguments}
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default is inspect.Parameter.empty for p in parameters}


def _package_lacks(module: str, package: str, *functions: str) -> str:
    """Why the package cannot be used. Only an import tells: a build for another PyTorch fails there, and
    version 4 installs a `flash_attn` that has no such module."""
    try:
        interface = importlib.import_module(module)
    except ModuleNotFoundError:
        return f"{package} is not installed"
    except (ImportError, OSError) as reason:
        return f"{package} cannot be imported: {reason}"
    for function in functions:
        if "cu_seqlens_q" not in _parameters(getattr(interface, function, lambda: None)):
            return f"{module}.{function} of this release of {package} takes no packed segments"
    return ""


def _common(q: Tensor, q_lengths: PackedLengths, k_lengths: PackedLengths, scale: float) -> dict[str, Any]:
    return {
        "cu_seqlens_q": q_lengths.cumulative(q.device),
        "cu_seqlens_k": k_lengths.cumulative(q.device),
        "max_seqlen_q": q_lengths.longest,
        "max_seqlen_k": k_lengths.longest,
        "softmax_scale": scale,
        "dropout_p": 0.0,
        "causal": False,
        "is_causal": False,
        "window_size": (-1, -1),
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }


def _tokens_first(lse: Tensor, q: Tensor) -> Tensor:
    """[H, T] -> [T, H]. Raises: EngineError if it is laid out otherwise."""
    if lse.shape != (q.shape[1], q.shape[0]):
        raise EngineError(
            f"this flash-attn release returns a padded log-sum-exp, {tuple(lse.shape)}",
            fix="upgrade flash-attn, or engine.kernel=torch_varlen",
        )
    return lse.transpose(0, 1).contiguous()


def _differentiate(
    function: _ByName,
    common: dict[str, Any],
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    function(
        dout=dout.contiguous(),
        q=q,
        k=k,
        v=v,
        out=out,
        softmax_lse=lse.transpose(0, 1).contiguous(),
        dq=dq,
        dk=dk,
        dv=dv,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **common,
    )
    return dq, dk, dv
