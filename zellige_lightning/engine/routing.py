"""Sends the scaled_dot_product_attention calls of chosen modules to the engine, without touching their
code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from zellige_lightning.engine.engine import CoalescedAttentionEngine
from zellige_lightning.errors import EngineError

# What they compute inside is not announced to function modes.
_OPAQUE = (F.multi_head_attention_forward, torch._native_multi_head_attention)

Attention = Callable[[Tensor, Tensor, Tensor, "float | None"], Tensor]

_local = threading.local()


def current_engine() -> CoalescedAttentionEngine | None:
    """The engine of the step that this thread is in, if any."""
    return getattr(_local, "engine", None)


@contextmanager
def engine_of_step(engine: CoalescedAttentionEngine) -> Iterator[None]:
    """Make `engine` the one that `checkpoint` finds."""
    previous = current_engine()
    _local.engine = engine
    try:
        yield
    finally:
        _local.engine = previous


class AttentionRouter:
    """Answers the attention calls inside the attached modules while `attention` is set; else leaves them
    alone.

    A module whose attention is a callable attribute named `attention`, taking (query, key, value), gets that
    attribute replaced: nothing else is needed, and `torch.compile` traces it. In any other module the calls
    of `F.scaled_dot_product_attention` are caught by forward hooks and a torch function mode, which the
    compiler traces only in part. Either way copies of a module (EMA, profiling) and the recomputation of a
    checkpointed region are routed as well, and no parameter or name changes.
    """

    def __init__(self) -> None:
        self.attention: Attention | None = None
        self._handles: list[RemovableHandle] = []
        self._replaced: list[nn.Module] = []
        self._open: list[_Route] = []

    def attach(self, name: str, module: nn.Module) -> None:
        """Route the calls inside `module`; `name` is used in messages."""
        own = getattr(module, "attention", None)
        if callable(own) and not isinstance(own, nn.Module):
            module.attention = _Answered(self, name, own)  # type: ignore[assignment]
            self._replaced.append(module)
            return

        def enter(module: nn.Module, args: Any) -> None:
            route = _Route(self, name, module)
            route.__enter__()
            self._open.append(route)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            # not entered, if a hook before ours failed
            if self._open and self._open[-1].module is module:
                self._open.pop().__exit__(None, None, None)

        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def detach(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._replaced:
            module.attention = module.__dict__["attention"].own
        self._replaced.clear()
        while self._open:  # hooks do not run on an interrupt, after which a notebook goes on
            self._open.pop().__exit__(None, None, None)

    @contextmanager
    def answered_by(self, attention: Attention | None) -> Iterator[None]:
        """Use `attention` for the duration of a block."""
        previous, self.attention = self.attention, attention
        try:
            yield
        finally:
            self.attention = previous


class _Answered:
    """Stands in for a module's `attention`. Copies of the module share it, as they share the router."""

    def __init__(self, router: AttentionRouter, name: str, own: Callable[..., Tensor]) -> None:
        self.own, self._router, self._name = own, router, name

    def __deepcopy__(self, memo: dict[int, Any]) -> _Answered:
        return self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if self._router.attention is None:
            return self.own(query, key, value, **options)
        return _answer(self._router.attention, self._name, query, key, value, **options)


class _Route(TorchFunctionMode):
    def __init__(self, router: AttentionRouter, name: str, module: nn.Module) -> None:
        super().__init__()
        self._router, self._name, self.module = router, name, module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._router.attention is not None:
            if func is F.scaled_dot_product_attention:
                return _answer(self._router.attention, self._name, *args, **(kwargs or {}))
            if func in _OPAQUE:
                raise EngineError(
                    f"module {self._name!r} uses torch.nn.MultiheadAttention, which keeps its call hidden",
                    fix="project q, k, v and call torch.nn.functional.scaled_dot_product_attention instead",
                )
        return func(*args, **(kwargs or {}))


def _answer(
    attention: Attention,
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """query [1, H, T, D], key and value [1, H or fewer, T, D] -> [1, H, T, D]."""
    if attn_mask is not None or dropout_p or is_causal:
        raise EngineError(
            f"module {name!r} calls attention with a mask, dropout or causality",
            fix="the engine computes full attention within each sequence; remove mask and dropout",
        )
    packed = query.dim() == key.dim() == 4 and query.shape[0] == key.shape[0] == 1
    if not packed or key.shape[2] != query.shape[2]:
        raise EngineError(
            f"module {name!r} calls attention with query {tuple(query.shape)} and key"
            f" {tuple(key.shape)}, not self-attention over [1, H, T, D] packed tokens",
            fix="match only self-attention modules in `coalesced_attention`, and pack the tokens",
        )
    if enable_gqa:
        repeats, rest = divmod(query.shape[1], key.shape[1])
        if rest:
            raise EngineError(
                f"module {name!r} has {query.shape[1]} query heads and {key.shape[1]} key heads",
                fix="the number of query heads must be a multiple of that of key heads",
            )
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = attention(q, k, v, scale)
    return out.transpose(0, 1)[None]
