"""Any map-style dataset as a token source: two user functions say what a sample is and how it becomes
tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zellige_lightning.errors import DataError, ZelligeError
from zellige_lightning.placement import Sequence
from zellige_lightning.sources.base import FieldSpec, Sample

Loaded = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]  # token fields, sequence fields


class DatasetSource:
    """A map-style dataset read by index.

    Every participant of a split sequence loads the item and keeps its rows, which is exact for any dataset
    and costs one decode per participant. A store that can read row ranges should implement `TokenSource`
    itself.

    Args:
        dataset: has `__len__` and `__getitem__(int)`.
        describe: index -> `Sample`; must not decode media, it is called once for each index at set-up.
        tokenize: item -> (token fields, sequence fields); token fields have one row per token.
    """

    def __init__(
        self,
        dataset: Any,
        describe: Callable[[int], Sample],
        tokenize: Callable[[Any], Loaded],
    ) -> None:
        self._dataset, self._tokenize = dataset, tokenize
        self._last: tuple[str, Loaded] | None = None
        self.samples = tuple(describe(index) for index in range(len(dataset)))
        self._index_of = {sample.key: index for index, sample in enumerate(self.samples)}
        if len(self._index_of) != len(self.samples):
            raise DataError("sample keys repeat", fix="`describe` must give each sample a key of its own")
        if not self.samples:
            raise DataError("the dataset has no sample", fix="check the path and the filters of the dataset")
        tokens, sequence = self._load(self.samples[0].key)
        self.token_fields = {n: FieldSpec(tuple(t.shape[1:]), t.dtype) for n, t in tokens.items()}
        self.sequence_fields = {n: FieldSpec(tuple(t.shape), t.dtype) for n, t in sequence.items()}

    def read_tokens(self, sequence: Sequence, tokens: range) -> dict[str, Tensor]:
        fields, _ = self._load(sequence.key)
        for name, tensor in fields.items():
            if tensor.shape[0] != sequence.num_tokens:
                raise DataError(
                    f"sample {sequence.key!r}: field {name!r} has {tensor.shape[0]} rows, its grid"
                    f" {sequence.bucket.grid} has {sequence.num_tokens} tokens",
                    fix="`describe` and `tokenize` must agree on the grid",
                )
        return {name: tensor[tokens.start : tokens.stop] for name, tensor in fields.items()}

    def read_sequence(self, sequence: Sequence) -> dict[str, Tensor]:
        _, fields = self._load(sequence.key)
        return {name: torch.as_tensor(tensor) for name, tensor in fields.items()}

    def _load(self, key: str) -> Loaded:
        """Fields of a sample. The last one is kept, since its tokens and its sequence fields are read in
        turn."""
        if self._last is None or self._last[0] != key:
            self._last = None  # two items at a time would double the memory
            try:
                self._last = key, self._tokenize(self._dataset[self._index_of[key]])
            except ZelligeError:
                raise
            except Exception as error:
                raise DataError(
                    f"sample {key!r} cannot be read: {type(error).__name__}: {error}",
                    fix="repair or remove the sample, or correct `tokenize`",
                ) from error
        return self._last[1]
