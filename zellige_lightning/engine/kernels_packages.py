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
from zellige_lightning.engine.packing import Segments, TensorKind
from zellige_lightning.errors import EngineError

HOPPER = 90


class FlashAttnKernel:
    """The flash-attn package (version 2)."""

    name = "flash_attn"
    _module, _package = "flash_attn.flash_attn_interface", "flash-attn"
    _functions = "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"

    def __init__(self) -> None:
        interface = importlib.import_module(self._module)
        self._forward, self._backward = (_ByName(getattr(interface, name)) for name in self._functions)

    @classmethod
    def lacks(cls, kind: TensorKind) -> str:
        return flash_2_lacks(kind) or cls._package_lacks()

    @classmethod
    def _package_lacks(cls) -> str:
        """Why the package cannot be used. Only an import tells: a build for another PyTorch fails there, and
        version 4 installs a `flash_attn` that has no such module."""
        try:
            interface = importlib.import_module(cls._module)
        except ModuleNotFoundError:
            return f"{cls._package} is not installed"
        except (ImportError, OSError) as reason:
            return f"{cls._package} cannot be imported: {reason}"
        for name in cls._functions:
            if "cu_seqlens_q" not in _parameters(getattr(interface, name, lambda: None)):
                return f"{cls._module}.{name} of this release of {cls._package} takes no packed segments"
        return ""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
        # One split of the keys: partial results of several would be added in another precision and order.
        result = self._forward(q=q, k=k, v=v, return_softmax=False, num_splits=1, **_common(q, segments))
        # (out, lse, ...), in old releases of version 2 (out, q, k, v, padded out, lse, ...)
        return result[0], _tokens_first(result[5] if len(result) == 8 else result[1], q)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self._backward(
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
            **_common(q, segments),
        )
        return dq, dk, dv


class FlashAttn3Kernel(FlashAttnKernel):
    """The flash-attn package for Hopper (version 3). Its pair of functions is called, not its autograd, which
    has no deterministic backward."""

    name = "flash_attn_3"
    _module, _package = "flash_attn_interface", "flash-attn 3"
    _functions = "_flash_attn_forward", "_flash_attn_backward"

    @classmethod
    def lacks(cls, kind: TensorKind) -> str:
        if reason := flash_2_lacks(kind):  # what it takes is the same
            return reason
        if kind.capability != HOPPER or torch.version.hip is not None:
            return "it is written for Hopper GPUs (compute capability 9.0)"
        return cls._package_lacks()


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


def _common(q: Tensor, segments: Segments) -> dict[str, Any]:
    queries, keys = segments.cumulative(q.device)
    return {
        "cu_seqlens_q": queries,
        "cu_seqlens_k": keys,
        "max_seqlen_q": segments.queries.longest,
        "max_seqlen_k": segments.keys.longest,
        "softmax_scale": segments.scale,
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
