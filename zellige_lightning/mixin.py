"""`CoalescedAttentionMixin`: the self-attention of a LightningModule, answered by the engine."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from zellige_lightning.batch import RankBatch
from zellige_lightning.engine import AttentionRouter
from zellige_lightning.errors import EngineError


class CoalescedAttentionMixin:
    """Put it before `LightningModule` among the bases, and name the self-attention modules.

    Inside the modules that match `coalesced_attention` every call of `F.scaled_dot_product_attention` on
    `[1, H, T, D]` packed tokens is answered by the Coalesced Attention Engine while a planned batch
    trains. It adds no parameter and changes no name, so checkpoints are those of the plain model. Outside
    a planned step the calls run as they are, which is right for a single whole sequence.

    Attributes:
        coalesced_attention: glob patterns of module names, such as `("model.blocks.*.self_attn",)`.
    """

    coalesced_attention: tuple[str, ...] = ()
    _planned_batch: RankBatch | None = None
    _wave: tuple[int, int] = (0, 0)  # number of the wave that runs, and of the last one
    _wave_sums: dict[str, Tensor] | None = None  # losses that earlier waves of the step have logged

    def attention_modules(self) -> dict[str, nn.Module]:
        """The matching modules by name.

        Raises:
            EngineError: nothing matches.
        """
        assert isinstance(self, nn.Module)
        names = [name for name, _ in self.named_modules() if name]
        patterns = self.coalesced_attention
        patterns = (patterns,) if isinstance(patterns, str) else patterns
        matched = {n: self.get_submodule(n) for n in names if any(fnmatchcase(n, p) for p in patterns)}
        if not matched:
            raise EngineError(
                f"no module of {type(self).__name__} matches coalesced_attention={patterns!r}",
                fix=f"name the self-attention modules; there are for example {_suggest(names)}",
            )
        return matched

    def route_attention(self, router: AttentionRouter) -> None:
        """Attach `router` to the matching modules."""
        for name, module in self.attention_modules().items():
            router.attach(name, module)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Like `LightningModule.log`; in the steps of planned batches the mean over ranks unless
        `sync_dist` is given.

        `RankBatch.reduce` is scaled so that in training this mean is the loss of the global batch. In
        evaluation, where each rank has sequences of its own, it is the mean over all sequences.
        """
        batch = self._planned_batch
        if batch is not None:
            world_size = self._trainer.world_size  # type: ignore[attr-defined]
            kwargs.setdefault("sync_dist", world_size > 1 and not kwargs.get("rank_zero_only"))
            # Lightning averages these weights over the ranks as integers: multiples of N lose nothing.
            kwargs.setdefault("batch_size", world_size * len(batch.global_batch.sequences))
            value = self._over_waves(name, value)
            if value is None:
                return
        super().log(name, value, *args, **kwargs)  # type: ignore[misc]

    def _over_waves(self, name: str, value: Any) -> Any:
        """What to log of a value that each wave logs: a loss adds up, of anything else the last one counts.
        None before the last wave."""
        number, last = self._wave
        total = value.detach() if isinstance(value, Tensor) else value
        if self._wave_sums is not None and isinstance(value, Tensor) and value.requires_grad:
            total = self._wave_sums[name] = total + self._wave_sums.get(name, 0.0)
        return total if number == last else None


def require_mixin(module: object) -> CoalescedAttentionMixin:
    """`module`, if planned batches can run on it.

    Raises:
        EngineError: its attention cannot be answered by the engine.
    """
    if not isinstance(module, CoalescedAttentionMixin):
        raise EngineError(
            f"{type(module).__name__} is to run on planned batches and has no CoalescedAttentionMixin",
            fix="class Model(CoalescedAttentionMixin, LightningModule), with `coalesced_attention` patterns",
        )
    return module


def _suggest(names: list[str]) -> list[str]:
    likely = [name for name in names if "attn" in name.lower() or "attention" in name.lower()]
    return (likely or names)[:4]
