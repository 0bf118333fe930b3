"""Any map-style dataset as a source, and the synthetic source."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.placement import Bucket, Sequence
from zellige_lightning.sources import DatasetSource, FieldSpec, Sample, SyntheticSource, TokenSource

GRID = (2, 3, 4)
SEQUENCE = Sequence(0, "item-1", Bucket("b", GRID))


class Items:
    """Counts how often each item is decoded."""

    def __init__(self, number: int = 3) -> None:
        self.number, self.decoded = number, [0] * number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> int:
        self.decoded[index] += 1
        return index


def describe(index: int) -> Sample:
    return Sample(f"item-{index}", GRID)


def tokenize(item: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    rows = torch.arange(24 * 5, dtype=torch.float32).view(24, 5) + 1000 * item
    return {"latents": rows}, {"text": torch.full((7, 2), item, dtype=torch.bfloat16)}


def test_fields_are_those_of_the_first_item() -> None:
    source = DatasetSource(Items(), describe, tokenize)
    assert isinstance(source, TokenSource)
    assert source.token_fields == {"latents": FieldSpec((5,), torch.float32)}
    assert source.sequence_fields == {"text": FieldSpec((7, 2), torch.bfloat16)}
    assert [sample.key for sample in source.samples] == ["item-0", "item-1", "item-2"]


def test_ranges_of_an_item() -> None:
    source = DatasetSource(Items(), describe, tokenize)
    whole = tokenize(1)[0]["latents"]
    for start, stop in ((0, 24), (5, 9), (23, 24), (7, 7)):
        assert torch.equal(source.read_tokens(SEQUENCE, range(start, stop))["latents"], whole[start:stop])
    assert torch.equal(source.read_sequence(SEQUENCE)["text"], tokenize(1)[1]["text"])


def test_a_sample_is_decoded_once_for_all_its_fields() -> None:
    items = Items()
    source = DatasetSource(items, describe, tokenize)
    for index in (0, 1, 2, 1):
        sequence = Sequence(0, f"item-{index}", SEQUENCE.bucket)
        source.read_tokens(sequence, range(3))
        source.read_sequence(sequence)
    assert items.decoded == [1, 2, 1]


def test_wrong_datasets_are_named() -> None:
    with pytest.raises(DataError, match="has no sample"):
        DatasetSource(Items(0), describe, tokenize)
    with pytest.raises(DataError, match="keys repeat"):
        DatasetSource(Items(), lambda _: Sample("same", GRID), tokenize)
    source = DatasetSource(Items(), describe, tokenize)
    other = Sequence(0, "item-1", Bucket("larger", (2, 3, 5)))
    with pytest.raises(DataError, match=r"'item-1': field 'latents' has 24 rows, its grid .* has 30 tokens"):
        source.read_tokens(other, range(30))


def test_an_item_that_cannot_be_read_is_named() -> None:
    def damaged(item: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        if item == 1:
            raise OSError("truncated file")
        return tokenize(item)

    source = DatasetSource(Items(), describe, damaged)
    with pytest.raises(DataError, match="'item-1' cannot be read: OSError: truncated file") as caught:
        source.read_tokens(SEQUENCE, range(2))
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(DataError, match="'absent' cannot be read"):
        source.read_sequence(Sequence(0, "absent", SEQUENCE.bucket))

    def refused(item: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        raise DataError("said already")

    with pytest.raises(DataError, match="^said already$"):
        DatasetSource(Items(), describe, refused)


def test_synthetic_shards_are_rows_of_the_whole() -> None:
    source = SyntheticSource(
        {"a": FieldSpec((4,), torch.bfloat16), "b": FieldSpec((), torch.float64)},
        {"text": FieldSpec((3, 2), torch.float32), "label": FieldSpec((2,), torch.int64)},
    )
    assert isinstance(source, TokenSource)
    whole = source.read_tokens(SEQUENCE, range(24))
    assert {name: (t.shape, t.dtype) for name, t in whole.items()} == {
        "a": ((24, 4), torch.bfloat16),
        "b": ((24,), torch.float64),
    }
    part = source.read_tokens(SEQUENCE, range(6, 11))
    assert all(torch.equal(part[name], whole[name][6:11]) for name in whole)
    other = source.read_tokens(Sequence(0, "item-2", SEQUENCE.bucket), range(24))
    assert not torch.equal(other["b"], whole["b"])
    fields = source.read_sequence(SEQUENCE)
    assert fields["text"].shape == (3, 2) and bool(fields["text"].abs().sum() > 0)
    assert fields["label"].dtype == torch.int64
    assert torch.equal(fields["text"], source.read_sequence(SEQUENCE)["text"])
