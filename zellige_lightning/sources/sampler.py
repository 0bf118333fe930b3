"""Which samples make a global batch: a pure function of (seed, epoch), the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.placement import Bucket, Catalog, GlobalBatch, Sequence
from zellige_lightning.placement.sequence import digest63
from zellige_lightning.sources.base import Sample


class GlobalBatchSampler:
    """Cuts an epoch into global batches under a token budget. Every sample appears once per epoch.

    Videos and images are shuffled apart and dealt so that videos hold about `video_token_share` of each batch as
    long as both kinds last; what is left over of one kind fills the last batches. A sample larger than the
    budget makes a batch of its own.

    Args:
        samples: what there is.
        catalog: gives each sample its bucket.
        tokens_per_batch: token budget of a global batch, over all ranks.
        video_token_share: target share of video tokens; None deals both kinds as they come.
        shuffle: off for evaluation.
    """

    def __init__(
        self,
        samples: Rows[Sample],
        catalog: Catalog,
        *,
        tokens_per_batch: int,
        video_token_share: float | None = None,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        if tokens_per_batch < 1:
            raise ConfigError(f"tokens_per_batch={tokens_per_batch}", fix="give a token budget >= 1")
        if video_token_share is not None and not 0.0 <= video_token_share <= 1.0:
            raise ConfigError(f"video_token_share={video_token_share}", fix="give a share between 0 and 1")
        if not samples:
            raise DataError("there is no sample to train on", fix="check the data path and the filters")
        self._items = [(sample.key, catalog.bucket_for(sample.grid)) for sample in samples]
        if len({key for key, _ in self._items}) != len(self._items):
            raise DataError("sample keys repeat", fix="each sample needs a key of its own")
        self._budget, self._share = tokens_per_batch, video_token_share
        self._seed, self._shuffle = seed, shuffle
        self._num_batches: int | None = None

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets that really occur, smallest first."""
        return tuple(sorted({bucket for _, bucket in self._items}, key=lambda b: (b.num_tokens, b.name)))

    def counts(self) -> dict[str, int]:
        """Number of samples by bucket name."""
        names = [bucket.name for _, bucket in self._items]
        return {bucket.name: names.count(bucket.name) for bucket in self.buckets}

    @property
    def num_batches(self) -> int:
        """Batches of an epoch; the same in every epoch, since trainers ask for the length once."""
        if self._num_batches is None:
            self._num_batches = len(self._deal_freely(0))
        return self._num_batches

    def deal(self, epoch: int) -> list[list[tuple[str, Bucket]]]:
        """The batches of an epoch as (key, bucket) lists, in training order; always `num_batches` of them."""
        batches = self._deal_freely(epoch)

        def tokens(batch: list[tuple[str, Bucket]]) -> int:
            return sum(bucket.num_tokens for _, bucket in batch)

        # Another shuffle may pack a little better or worse than that of epoch 0.
        while len(batches) > self.num_batches:
            smallest = min(batches, key=tokens)
            batches.remove(smallest)
            for item in smallest:
                min(batches, key=tokens).append(item)
        while len(batches) < self.num_batches:
            largest = max((b for b in batches if len(b) > 1), key=tokens)
            batches.append([largest.pop() for _ in range(len(largest) // 2)])
        return batches

    def _deal_freely(self, epoch: int) -> list[list[tuple[str, Bucket]]]:
        items = list(self._items)
        generator = random.Random(digest63(f"{self._seed}|{epoch}"))
        if self._shuffle:
            generator.shuffle(items)
        videos = [item for item in reversed(items) if item[1].is_video]
        images = [item for item in reversed(items) if not item[1].is_video]
        batches = []
        while videos or images:
            batches.append(self._next_batch(videos, images))
        if self._shuffle:
            generator.shuffle(batches)
        return batches

    def _next_batch(
        self, videos: list[tuple[str, Bucket]], images: list[tuple[str, Bucket]]
    ) -> list[tuple[str, Bucket]]:
        batch: list[tuple[str, Bucket]] = []
        room = self._budget
        share = self._share if self._share is not None else self._left_share(videos, images)
        video_room = self._budget * (share if images else 1.0)
        # Half a sample over the target is as good as half under it: rounds to the nearest, on average exact.
        while videos and videos[-1][1].num_tokens / 2 <= video_room and videos[-1][1].num_tokens <= room:
            video_room -= videos[-1][1].num_tokens
            room -= videos[-1][1].num_tokens
            batch.append(videos.pop())
        while images and images[-1][1].num_tokens <= room:
            room -= images[-1][1].num_tokens
            batch.append(images.pop())
        while videos and not images and videos[-1][1].num_tokens <= room:
            room -= videos[-1][1].num_tokens
            batch.append(videos.pop())
        if not batch:  # larger than the budget
            batch.append((videos or images).pop())
        return batch

    @staticmethod
    def _left_share(videos: list[tuple[str, Bucket]], images: list[tuple[str, Bucket]]) -> float:
        video, image = (sum(bucket.num_tokens for _, bucket in items) for items in (videos, images))
        return video / (video + image)

    def epoch_batches(
        self, epoch: int, first_step: int, window: int, limit: int | None = None
    ) -> list[GlobalBatch]:
        """The global batches of an epoch, with the size of the accumulation window that each is part of.

        Args:
            first_step: number of the first global batch.
            window: global batches per optimizer step; the last window of an epoch may be shorter.
            limit: batches that will really be used, where the trainer cuts the epoch short.
        """
        dealt = self.deal(epoch)[:limit]
        out: list[GlobalBatch] = []
        for start in range(0, len(dealt), window):
            part = dealt[start : start + window]
            num_sequences = sum(map(len, part))
            num_tokens = sum(bucket.num_tokens for items in part for _, bucket in items)
            for items in part:
                sequences = tuple(Sequence(i, key, bucket) for i, (key, bucket) in enumerate(items))
                out.append(GlobalBatch(first_step + len(out), epoch, sequences, num_sequences, num_tokens))
        return out
