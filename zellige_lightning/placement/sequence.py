"""What is to be placed: sequences of tokens, grouped by the bucket (shape) that they share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from zellige_lightning.errors import ConfigError, DataError

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A shape that sequences share. `grid` is (T, H, W) in tokens (latent frames, rows, columns)."""

    name: str
    grid: Grid

    def __post_init__(self) -> None:
        if len(self.grid) != 3 or any(not isinstance(n, int) or n < 1 for n in self.grid):
            raise ConfigError(
                f"bucket {self.name!r} has grid {self.grid!r}",
                fix="a grid is three integers >= 1: (latent frames, rows, columns) in tokens",
            )

    @property
    def num_tokens(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns

    @property
    def is_video(self) -> bool:
        """More than one latent frame. An image is one latent frame."""
        return self.grid[0] > 1


def adhoc_name(grid: Grid) -> str:
    return "adhoc-" + "x".join(map(str, grid))


@dataclass(frozen=True)
class Catalog:
    """The buckets that a job expects, in any order.

    A shape outside the catalog becomes an ad-hoc bucket, or a `DataError` where `strict`.
    """

    buckets: tuple[Bucket, ...]
    strict: bool = False
    _by_grid: dict[Grid, Bucket] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [b.name for b in self.buckets]
        if not names:
            raise ConfigError(
                "the catalog has no bucket", fix="name at least one shape under `catalog.buckets`"
            )
        if len(set(names)) != len(names):
            raise ConfigError(f"bucket names repeat: {sorted(names)}", fix="give each bucket its own name")
        by_grid = {b.grid: b for b in self.buckets}
        if len(by_grid) != len(self.buckets):
            raise ConfigError(
                "two buckets share one grid", fix="a shape belongs to one bucket; remove the double"
            )
        object.__setattr__(self, "_by_grid", by_grid)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def bucket_for(self, grid: Grid) -> Bucket:
        """The bucket of that shape; an ad-hoc one if the catalog has none and is not strict."""
        if (bucket := self._by_grid.get(grid)) is not None:
            return bucket
        if self.strict:
            raise DataError(
                f"no bucket of the catalog has grid {grid}",
                fix=f"resize the sample to one of {sorted(self._by_grid)}, or set catalog.strict=false",
            )
        return Bucket(adhoc_name(grid), grid)


@dataclass(frozen=True, slots=True)
class Sequence:
    """One image or video as tokens; metadata only.

    `index` is its place in the global batch, `key` names the sample for ever (its noise is drawn from it).
    """

    index: int
    key: str
    bucket: Bucket

    @property
    def num_tokens(self) -> int:
        return self.bucket.num_tokens


@dataclass(frozen=True)
class GlobalBatch:
    """What all ranks together consume between two plans; the same on every rank.

    Args:
        step: number of this global batch since the start of training (not reset by epochs).
        epoch: the epoch that it belongs to; noise is drawn from (seed, epoch, key).
        sequences: in order, `sequences[i].index == i`.
        window_sequences: number of sequences of the whole accumulation window that this batch is part of.
            The loss is a mean over the window, so every weight needs it.
        window_tokens: the same for tokens, used where the loss is a mean over tokens.
    """

    step: int
    epoch: int
    sequences: tuple[Sequence, ...]
    window_sequences: int
    window_tokens: int

    def __post_init__(self) -> None:
        if [s.index for s in self.sequences] != list(range(len(self.sequences))):
            raise DataError("sequence indices of a global batch must be 0, 1, 2, ...", step=self.step)
        if self.window_sequences < len(self.sequences):
            raise DataError(
                f"a window of {self.window_sequences} sequences holds a batch of {len(self.sequences)}",
                step=self.step,
            )

    @classmethod
    def of(cls, step: int, epoch: int, samples: Iterable[tuple[str, Bucket]]) -> GlobalBatch:
        """A batch of (key, bucket) pairs that is an accumulation window of its own."""
        sequences = tuple(Sequence(i, key, bucket) for i, (key, bucket) in enumerate(samples))
        return cls(step, epoch, sequences, len(sequences), sum(s.num_tokens for s in sequences))

    def part(self, members: Iterable[int]) -> GlobalBatch:
        """Some of its sequences, indexed anew, in the same accumulation window: a wave."""
        sequences = tuple(replace(self.sequences[member], index=i) for i, member in enumerate(members))
        return replace(self, sequences=sequences)

    def alone(self) -> GlobalBatch:
        """The same sequences as an accumulation window of their own."""
        return GlobalBatch.of(self.step, self.epoch, [(s.key, s.bucket) for s in self.sequences])

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.sequences)

    @property
    def digest(self) -> int:
        """63-bit hash of all fields. Ranks compare it before a step, since they must agree on the batch."""
        text = f"{self.step}|{self.epoch}|{self.window_sequences}|{self.window_tokens}|" + "|".join(
            f"{s.key}:{s.bucket.name}:{s.bucket.grid}" for s in self.sequences
        )
        return digest63(text)


def digest63(text: str) -> int:
    """63 bits of SHA-256, so that it fits an int64 tensor."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
