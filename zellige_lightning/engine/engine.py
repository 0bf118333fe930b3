"""The Coalesced Attention Engine (paper, Sec. IV-D): whole sequences next to shards, in one autograd node.

One node per call makes the order of collectives in backward ours: with one node per segment, autograd's order
depends on the local mix of segments, and two ranks silently swap gradients.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from zellige_lightning.engine import operator
from zellige_lightning.engine.attention import SplitAttention, WholePack
from zellige_lightning.engine.collectives import GroupTransport
from zellige_lightning.engine.counters import Counters
from zellige_lightning.engine.groups import ProcessGroupCache
from zellige_lightning.engine.lowered import Lowered
from zellige_lightning.engine.member import InFlight
from zellige_lightning.engine.observer import StepObserver
from zellige_lightning.engine.packing import accumulation_dtype
from zellige_lightning.engine.saving import Slices, divide
from zellige_lightning.errors import EngineError
from zellige_lightning.placement import RankSchedule


@dataclass(frozen=True)
class _Current:
    """What is installed: the whole schedule, and its parts where some of its attention is kept."""

    schedule_id: Tensor
    parts: tuple[tuple[Tensor, Slices], ...] = ()


class CoalescedAttentionEngine:
    """Attention over a rank's packed tokens, following the schedule that is installed.

    Args:
        groups: process groups of the legal family; None on a single rank.
        max_schedules: schedules kept for backwards that come later than the next `install`.
        keep_when_compiled: whether compiled checkpointed regions keep all attention; a graph serves every
            plan, so it cannot keep some sequences only.
        gather_chunks: bound on the head chunks in which an all-gather overlaps with attention.
    """

    def __init__(
        self,
        groups: ProcessGroupCache | None = None,
        max_schedules: int = 256,
        keep_when_compiled: bool = False,
        gather_chunks: int = 4,
    ) -> None:
        self.keep_when_compiled = keep_when_compiled
        self.overlap = True  # run whole sequences while exchanges are in flight
        self.observer, self._most_chunks = StepObserver(), gather_chunks
        self._transport = GroupTransport(groups, self.observer) if groups is not None else None
        self._lowered: OrderedDict[int, Lowered] = OrderedDict()
        self._max_schedules = max_schedules
        self._kept: set[int] = set()
        self._current: _Current | None = None
        self._next_id = 0
        self.handle = operator.register(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> CoalescedAttentionEngine:
        """Copies of a model (EMA, profiling) share the engine: process groups cannot be copied."""
        return self

    @property
    def counters(self) -> Counters:
        """What this rank did since they were reset."""
        return self.observer.counters

    @property
    def active(self) -> bool:
        """Whether a schedule is installed."""
        return self._current is not None

    @property
    def schedule(self) -> RankSchedule:
        """The installed schedule."""
        return self._find(self._require_current().schedule_id).schedule

    def install(self, schedule: RankSchedule, kept: frozenset[int] = frozenset()) -> None:
        """Make `schedule` the current one. Checkpointed regions that were entered under another one still
        recompute under theirs.

        Args:
            kept: sequences whose attention output `checkpoint` keeps instead of recomputing it; the same on
                all ranks, since what is kept exchanges nothing again.
        """
        parts = divide(schedule, kept)
        if len(parts) == 1:
            ((_, _, keep),) = parts
            self._current = _Current(self._register(schedule, keep))
        else:
            divided = tuple((self._register(part, keep), slices) for part, slices, keep in parts)
            self._current = _Current(self._register(schedule, False), divided)
        while len(self._lowered) > self._max_schedules:
            self._kept.discard(self._lowered.popitem(last=False)[0])

    def _register(self, schedule: RankSchedule, keep: bool) -> Tensor:
        schedule_id = self._next_id
        self._next_id += 1
        self._lowered[schedule_id] = Lowered(schedule, self._transport, self.observer, self._most_chunks)
        if keep:
            self._kept.add(schedule_id)
        return torch.tensor([schedule_id])

    def forget(self) -> None:
        """Drop all schedules, with what they hold on the device: no backward is pending any more."""
        self._current = None
        self._lowered.clear()
        self._kept.clear()

    def uninstall(self) -> None:
        """Forget the current schedule; those needed by a pending backward stay."""
        self._current = None

    @contextmanager
    def installed(self, schedule: RankSchedule, kept: frozenset[int] = frozenset()) -> Iterator[None]:
        """`schedule` for the duration of a block, then the previous one."""
        previous = self._current
        self.install(schedule, kept)
        try:
            yield
        finally:
            self._current = previous

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        """Attention of each local token over its whole sequence.

        Args:
            q, k, v: `[T, H, D]`, local tokens in buffer order.
            scale: default D**-0.5.

        Returns:
            `[T, H, D]`, in input order.

        Raises:
            EngineError: another number of tokens than scheduled, or heads that a head split does not divide.
            CollectiveError: a peer is gone or late.
        """
        current = self._require_current()
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if not current.parts or torch.compiler.is_compiling():  # a graph must not depend on the division
            return operator.attention(q, k, v, current.schedule_id, scale, self.handle)[0]
        _check(self.schedule, q, k, v)
        pieces: list[tuple[slice, Tensor]] = []
        for schedule_id, slices in current.parts:
            rows = [torch.cat([x[s] for s in slices]) if len(slices) > 1 else x[slices[0]] for x in (q, k, v)]
            part, _ = operator.attention(*rows, schedule_id, scale, self.handle)
            pieces += zip(slices, part.split([s.stop - s.start for s in slices]), strict=True)
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda p: p[0].start)])

    def _require_current(self) -> _Current:
        if self._current is None:
            raise EngineError(
                "no schedule is installed",
                fix='train with Trainer(strategy="zellige"), or call engine.install(schedule) first',
            )
        return self._current

    def _enter(self, schedule_id: Tensor, phase: str) -> Lowered:
        self.observer.enter(int(schedule_id), phase)
        return self._find(schedule_id)

    def _find(self, schedule_id: Tensor) -> Lowered:
        try:
            return self._lowered[int(schedule_id)]
        except KeyError:
            raise EngineError(
                f"schedule {int(schedule_id)} is gone: more than {self._max_schedules} were installed since",
                fix="run the backward of a batch before that many further batches",
            ) from None

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """(forward, recompute) contexts for `torch.utils.checkpoint`: recompute under the schedule of
        forward, without the attention that was kept."""
        at_forward = self._current
        saving: AbstractContextManager[None] = nullcontext()
        cached: AbstractContextManager[None] = nullcontext()
        if at_forward is not None and (at_forward.parts or int(at_forward.schedule_id) in self._kept):
            # these see every operation, so they are not free
            saving, cached = create_selective_checkpoint_contexts(self._keep_or_recompute)

        @contextmanager
        def recompute() -> Iterator[None]:
            previous, self._current = self._current, at_forward
            try:
                with cached:
                    yield
            finally:
                self._current = previous

        return saving, recompute()

    def _keep_or_recompute(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = op is torch.ops.zellige.attention.default and int(args[3]) in self._kept
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, schedule_id: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out `[T, H, D]`, lse `[T, H]`."""
        lowered = self._enter(schedule_id, "forward")
        _check(lowered.schedule, q, k, v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))

        def split(attention: SplitAttention, rows: slice) -> InFlight:
            return attention.forward(q[rows], k[rows], v[rows], scale)

        def whole(attention: WholePack, rows: slice) -> tuple[Tensor, ...]:
            return attention.forward(q[rows], k[rows], v[rows], scale)

        out, lse = self._run(lowered, "forward", split, whole, (out, lse))
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        schedule_id: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv `[T, H, D]`."""
        lowered = self._enter(schedule_id, "backward")
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))

        def split(attention: SplitAttention, rows: slice) -> InFlight:
            return attention.backward(dout[rows], q[rows], k[rows], v[rows], out[rows], lse[rows], scale)

        def whole(attention: WholePack, rows: slice) -> tuple[Tensor, ...]:
            return attention.backward(dout[rows], q[rows], k[rows], v[rows], out[rows], lse[rows], scale)

        dq, dk, dv = self._run(lowered, "backward", split, whole, (dq, dk, dv))
        return dq, dk, dv

    def _run(
        self,
        lowered: Lowered,
        which: str,
        split: Callable[[SplitAttention, slice], InFlight],
        whole: Callable[[WholePack, slice], tuple[Tensor, ...]],
        into: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Split blocks in order; whole sequences in their pauses, since they need no exchange."""
        pieces = dict(lowered.pieces[which])
        if not lowered.split and pieces:  # one piece, nothing to put together
            ((rows, pack),) = pieces.values()
            return tuple(result.contiguous() for result in whole(pack, rows))
        pause = 0
        for rows, attention in lowered.split:
            running = split(attention, rows)
            results = None
            while results is None:
                try:
                    next(running)
                except StopIteration as done:
                    results = done.value
                else:
                    if self.overlap and pause in pieces:
                        here, pack = pieces.pop(pause)
                        _store(into, here, whole(pack, here))
                    pause += 1
            _store(into, rows, results)
        for here, pack in pieces.values():
            _store(into, here, whole(pack, here))
        return into


def _store(into: tuple[Tensor, ...], rows: slice, results: tuple[Tensor, ...]) -> None:
    for target, result in zip(into, results, strict=True):
        target[rows] = result


def _check(schedule: RankSchedule, q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.shape == k.shape == v.shape or q.dim() != 3 or q.shape[0] != schedule.num_tokens:
        raise EngineError(
            f"self-attention got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)};"
            f" this rank is planned to hold {schedule.num_tokens} tokens",
            fix="pass this rank's packed tokens as [T, H, D]; repeat grouped key/value heads first",
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise EngineError(
            f"self-attention got dtypes {q.dtype}, {k.dtype}, {v.dtype}",
            fix="cast them to one floating dtype",
        )
    heads = q.shape[1]
    for block in schedule.blocks:
        if heads % block.config.h:
            legal = [h for h in range(1, heads + 1) if heads % h == 0]
            raise EngineError(
                f"a head split of {block.config.h} does not divide {heads} heads",
                fix=f"legal head degrees of this model are {legal}",
            )
