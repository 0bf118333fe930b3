"""Rows of samples that each lie on one rank, brought to where a plan wants them, by one exchange."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zellige_lightning.agreement import Agreement
from zellige_lightning.errors import DataError
from zellige_lightning.placement import GlobalBatch, Plan, Sequence
from zellige_lightning.placement.schedule import shard
from zellige_lightning.sources import FieldSpec, TokenSource
from zellige_lightning.sources.dataset import Loaded


@dataclass(frozen=True)
class _Parcel:
    """A token range of a sequence, with its per-sequence fields, on its way."""

    sequence: Sequence
    tokens: range
    owner: int
    receiver: int


class Arrived:
    """A `TokenSource` of the parcels that came to this rank."""

    samples = ()

    def __init__(self, source: TokenSource, parcels: Mapping[tuple[str, int, int], Loaded]) -> None:
        self.token_fields, self.sequence_fields = source.token_fields, source.sequence_fields
        self._parcels = parcels
        self._sequence_fields_of = {key: loaded[1] for (key, _, _), loaded in parcels.items()}

    def read_tokens(self, sequence: Sequence, tokens: range) -> dict[str, Tensor]:
        return dict(self._parcels[sequence.key, tokens.start, tokens.stop][0])

    def read_sequence(self, sequence: Sequence) -> dict[str, Tensor]:
        return dict(self._sequence_fields_of[sequence.key])


def route(
    waves: list[tuple[GlobalBatch, Plan]],
    owners: Mapping[str, int],
    load: Callable[[str], Loaded],
    source: TokenSource,
    agreement: Agreement,
) -> Arrived:
    """Send each token range of the plans from its owner to the rank that runs it. A collective.

    Args:
        owners: rank that holds a sample, by key; the same on all ranks.
        load: fields of a sample that this rank holds.
        source: whose fields they are.

    Raises:
        DataError: on all ranks, where one cannot read a sample or it has other fields than `source`.
    """
    parcels = [parcel for batch, plan in waves for parcel in _parcels(batch, plan, owners)]
    ranks = range(agreement.world_size)
    sent = agreement.together(lambda: _packed(parcels, agreement, load, source))
    mine = [[p for p in parcels if p.receiver == agreement.rank and p.owner == rank] for rank in ranks]
    sizes = [sum(_size(parcel, source) for parcel in part) for part in mine]
    received = agreement.exchange(sent, sizes)
    arrived: dict[tuple[str, int, int], Loaded] = {}
    for part, content in zip(mine, received, strict=True):
        for parcel in part:
            content, loaded = _unpack(content, parcel, source)
            arrived[parcel.sequence.key, parcel.tokens.start, parcel.tokens.stop] = loaded
    return Arrived(source, arrived)


def _parcels(batch: GlobalBatch, plan: Plan, owners: Mapping[str, int]) -> list[_Parcel]:
    return [
        _Parcel(
            sequence,
            shard(sequence.num_tokens, position, option.config.degree),
            owners[sequence.key],
            rank,
        )
        for sequence, option in zip(batch.sequences, plan.options, strict=True)
        for position, rank in enumerate(option.ranks)
    ]


def _packed(
    parcels: list[_Parcel], agreement: Agreement, load: Callable[[str], Loaded], source: TokenSource
) -> list[Tensor]:
    """Bytes for each rank. Each sample is loaded once."""
    content: list[list[Tensor]] = [[] for _ in range(agreement.world_size)]
    loaded: dict[str, Loaded] = {}
    for parcel in parcels:
        if parcel.owner == agreement.rank:
            key = parcel.sequence.key
            if key not in loaded:
                loaded[key] = _checked(parcel.sequence, load(key), source)
            tokens, sequence = loaded[key]
            part = slice(parcel.tokens.start, parcel.tokens.stop)
            content[parcel.receiver] += [_bytes(tokens[name][part]) for name in source.token_fields]
            content[parcel.receiver] += [_bytes(sequence[name]) for name in source.sequence_fields]
    return [torch.cat([torch.empty(0, dtype=torch.uint8), *part]) for part in content]


def _checked(sequence: Sequence, loaded: Loaded, source: TokenSource) -> Loaded:
    for fields, specs, length in (
        (loaded[0], source.token_fields, (sequence.num_tokens,)),
        (loaded[1], source.sequence_fields, ()),
    ):
        for name, spec in specs.items():
            tensor = fields.get(name)
            if tensor is None or tuple(tensor.shape) != (*length, *spec.shape) or tensor.dtype != spec.dtype:
                got = "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise DataError(
                    f"sample {sequence.key!r}: field {name!r} is {got}, expected {spec.dtype}"
                    f" {(*length, *spec.shape)}",
                    fix="`describe` and `tokenize` must agree on the grid, and samples on their fields",
                )
    return loaded


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _size(parcel: _Parcel, source: TokenSource) -> int:
    rows = [len(parcel.tokens) * _num_bytes(spec) for spec in source.token_fields.values()]
    return sum(rows) + sum(_num_bytes(spec) for spec in source.sequence_fields.values())


def _num_bytes(spec: FieldSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _unpack(content: Tensor, parcel: _Parcel, source: TokenSource) -> tuple[Tensor, Loaded]:
    """What is left of the content, and the fields of the parcel at its beginning."""
    loaded: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for fields, specs, length in (
        (loaded[0], source.token_fields, (len(parcel.tokens),)),
        (loaded[1], source.sequence_fields, ()),
    ):
        for name, spec in specs.items():
            size = math.prod(length) * _num_bytes(spec)
            values = content[:size].clone().view(spec.dtype)  # aligned, unlike its place in the content
            fields[name] = values.view(*length, *spec.shape)
            content = content[size:]
    return content, loaded
