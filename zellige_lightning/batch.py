"""What one rank trains on: the tokens that the plan gives it, with positions, segments and loss weights.

Shapes: T = local tokens in buffer order, S = local segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.placement import (
    GlobalBatch,
    Plan,
    RankSchedule,
    Segment,
    Sequence,
    build_schedule,
    whole,
)
from zellige_lightning.placement.schedule import PADDING, padded
from zellige_lightning.placement.sequence import Bucket, Grid
from zellige_lightning.sources.base import FieldSpec, TokenSource

PADDING_SEQUENCE = Sequence(PADDING, "padding", Bucket("padding", (1, 1, 2)))


@dataclass
class RankBatch:
    """Tensors of one rank for one planned global batch. Not frozen: Lightning moves it to the device.

    Args:
        tokens: token fields, each `[T, ...]`.
        context: per-sequence fields, each `[S, ...]`, one row per local segment.
        positions: `[T, 3]` int64, absolute (t, y, x) in the sequence's grid. A shard keeps its own positions.
        segment_ids: `[T]` int64, index of the local segment of each token.
        token_weights: `[T]` float64, weight of each token in the loss, see `reduce`.

    A rank with fewer than two tokens or two segments is padded with segments of zeros and weight 0, of the
    `PADDING_SEQUENCE`, so that it runs the same compiled graph, and the same backward, as the others.
    """

    global_batch: GlobalBatch
    plan: Plan
    schedule: RankSchedule
    tokens: dict[str, Tensor]
    context: dict[str, Tensor]
    positions: Tensor
    segment_ids: Tensor
    token_weights: Tensor

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.schedule.segments

    @property
    def sequences(self) -> list[Sequence]:
        """The sequence of each local segment; `PADDING_SEQUENCE` for tokens of none."""
        return [_sequence_of(self.global_batch, s) for s in self.segments]

    @property
    def lengths(self) -> list[int]:
        """Local tokens of each segment, host integers."""
        return [len(s) for s in self.segments]

    @property
    def epoch(self) -> int:
        return self.global_batch.epoch

    @property
    def num_tokens(self) -> int:
        return self.schedule.num_tokens

    def reduce(self, per_token: Tensor) -> Tensor:
        """Weighted sum of a per-token loss `[T]`: its mean over ranks is the loss of the global batch.

        With several micro-batches per optimizer step, their mean is the loss of the window.

        Raises:
            DataError: a loss that is not one number per local token.
        """
        if per_token.shape != self.token_weights.shape:
            raise DataError(
                f"the loss has shape {tuple(per_token.shape)}, this rank has {self.num_tokens} tokens",
                fix="give `reduce` one loss value per token: average over channels only",
            )
        dtype = torch.promote_types(per_token.dtype, torch.float32)
        return (per_token.to(dtype) * self.token_weights.to(dtype)).sum()

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RankBatch:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return RankBatch(
            self.global_batch,
            self.plan,
            self.schedule,
            {name: move(t) for name, t in self.tokens.items()},
            {name: move(t) for name, t in self.context.items()},
            move(self.positions),
            move(self.segment_ids),
            move(self.token_weights),
        )


def positions_of(tokens: range, grid: Grid) -> Tensor:
    """Absolute (t, y, x) of a token range, `[len(tokens), 3]` int64. Tokens are ordered t, then y, then x."""
    _, rows, columns = grid
    p = torch.arange(tokens.start, tokens.stop)
    return torch.stack((p // (rows * columns), p // columns % rows, p % columns), dim=1)


def materialize(
    global_batch: GlobalBatch,
    plan: Plan,
    rank: int,
    source: TokenSource,
    *,
    accumulation: int = 1,
    loss_reduction: str = "sequence",
    pad: bool = False,
) -> RankBatch:
    """Read exactly the tokens that the plan gives to `rank`.

    Args:
        pad: add segments of weight 0 to a rank that has next to nothing.
        accumulation: micro-batches by which the trainer divides every loss; undone by the weights.
        loss_reduction: `sequence` weighs every sequence alike (weight 1/(S*L_s) per token), `token` every
            token.

    Raises:
        DataError: a source that returns other fields, shapes or dtypes than it announced, or the plan of
            another batch.
    """
    if len(plan.options) != len(global_batch.sequences):
        raise DataError(
            f"the plan places {len(plan.options)} sequences, the batch has {len(global_batch.sequences)}",
            fix="plan the batch that is to be read",
            step=global_batch.step,
        )
    lengths = [s.num_tokens for s in global_batch.sequences]
    filling = plan.filling[rank] if plan.filling else None
    schedule = build_schedule(plan.options, lengths, rank, plan.world_size, filling)
    schedule = padded(schedule) if pad else schedule
    rows: dict[str, list[Tensor]] = {name: [] for name in source.token_fields}
    context: dict[str, list[Tensor]] = {name: [] for name in source.sequence_fields}
    for segment in schedule.segments:
        sequence = _sequence_of(global_batch, segment)
        reader = source if sequence is not PADDING_SEQUENCE else _Zeros(source)
        _collect(
            rows, reader.read_tokens(sequence, segment.tokens), source.token_fields, sequence, len(segment)
        )
        _collect(context, reader.read_sequence(sequence), source.sequence_fields, sequence, None)
    counts = torch.tensor([len(s) for s in schedule.segments], dtype=torch.int64)
    scale = plan.world_size * accumulation
    weights = [
        0.0 if s.sequence == PADDING else scale / _denominator(global_batch, s, loss_reduction)
        for s in schedule.segments
    ]
    return RankBatch(
        global_batch=global_batch,
        plan=plan,
        schedule=schedule,
        tokens={n: _join(torch.cat, t, source.token_fields[n]) for n, t in rows.items()},
        context={n: _join(torch.stack, t, source.sequence_fields[n]) for n, t in context.items()},
        positions=torch.cat(
            [positions_of(s.tokens, _sequence_of(global_batch, s).bucket.grid) for s in schedule.segments]
            or [torch.zeros((0, 3), dtype=torch.int64)]
        ),
        segment_ids=torch.repeat_interleave(torch.arange(len(counts)), counts),
        token_weights=torch.repeat_interleave(torch.tensor(weights, dtype=torch.float64), counts),
    )


class _Zeros:
    """Reads zeros in the fields of a source."""

    def __init__(self, source: TokenSource) -> None:
        self._source = source

    def read_tokens(self, sequence: Sequence, tokens: range) -> dict[str, Tensor]:
        fields = self._source.token_fields
        return {n: torch.zeros((len(tokens), *spec.shape), dtype=spec.dtype) for n, spec in fields.items()}

    def read_sequence(self, sequence: Sequence) -> dict[str, Tensor]:
        fields = self._source.sequence_fields
        return {n: torch.zeros(spec.shape, dtype=spec.dtype) for n, spec in fields.items()}


def _sequence_of(batch: GlobalBatch, segment: Segment) -> Sequence:
    return PADDING_SEQUENCE if segment.sequence == PADDING else batch.sequences[segment.sequence]


def _denominator(batch: GlobalBatch, segment: Segment, loss_reduction: str) -> int:
    if loss_reduction == "token":
        return batch.window_tokens
    return batch.window_sequences * segment.num_tokens


def _collect(
    into: dict[str, list[Tensor]],
    fields: dict[str, Tensor],
    specs: Mapping[str, FieldSpec],
    sequence: Sequence,
    length: int | None,
) -> None:
    for name, spec in specs.items():
        tensor = fields.get(name)
        shape = spec.shape if length is None else (length, *spec.shape)
        if tensor is None or tuple(tensor.shape) != tuple(shape) or tensor.dtype != spec.dtype:
            got = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise DataError(
                f"sample {sequence.key!r}: field {name!r} is {got}, expected {spec.dtype} {tuple(shape)}",
                fix="re-encode the sample, or correct the fields that the source announces",
            )
        into[name].append(tensor)


def _join(join: Callable[[list[Tensor]], Tensor], tensors: list[Tensor], spec: FieldSpec) -> Tensor:
    if not tensors:
        return torch.zeros((0, *spec.shape), dtype=spec.dtype)
    return join(tensors)


def local_batch(batch: GlobalBatch, source: TokenSource, loss_reduction: str = "sequence") -> RankBatch:
    """All sequences of `batch` whole on this process: a world of its own."""
    size = len(batch.sequences)
    plan = Plan(batch.step, 1, (whole(0),) * size, (0,), (0,), planner="local")
    return materialize(batch, plan, 0, source, loss_reduction=loss_reduction)
