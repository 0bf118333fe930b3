"""Random tokens of given shapes: what the profiler trains on, so that profiling never waits for a disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Rows

import torch
from torch import Tensor

from zellige_lightning.placement import Sequence
from zellige_lightning.placement.sequence import digest63
from zellige_lightning.sources.base import FieldSpec, Sample


class SyntheticSource:
    """Values are a function of (key, field), so a shard equals the same rows of the whole.

    Args:
        token_fields: fields with one row per token.
        sequence_fields: fields with one row per sequence.
        samples: what it offers to a sampler; a profiler needs none.
    """

    def __init__(
        self,
        token_fields: Mapping[str, FieldSpec],
        sequence_fields: Mapping[str, FieldSpec],
        samples: Rows[Sample] = (),
    ) -> None:
        self.token_fields, self.sequence_fields, self.samples = token_fields, sequence_fields, samples

    def read_tokens(self, sequence: Sequence, tokens: range) -> dict[str, Tensor]:
        return {
            name: _random(f"{sequence.key}|{name}", (sequence.num_tokens, *spec.shape), spec.dtype)[
                tokens.start : tokens.stop
            ]
            for name, spec in self.token_fields.items()
        }

    def read_sequence(self, sequence: Sequence) -> dict[str, Tensor]:
        return {
            name: _random(f"{sequence.key}|{name}", spec.shape, spec.dtype)
            for name, spec in self.sequence_fields.items()
        }


def _random(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(digest63(key))
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
