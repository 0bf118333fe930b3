"""Which samples make a global batch: a pure function of (seed, epoch), the same on every rank."""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.placement import Bucket, Catalog, GlobalBatch, Sequence
from zellige_lightning.placement.sequence import digest63
from zellige_lightning.sources.base import Sample

Items = list[tuple[str, Bucket]]  # (key, bucket) of samples

_ATTEMPTS = 16  # shuffles tried until an epoch fits into as many batches as the first one


def _tokens(items: Items) -> int:
    return sum(bucket.num_tokens for _, bucket in items)


class GlobalBatchSampler:
    """Cuts an epoch into global batches under a token budget. Every sample appears once per epoch.

    Videos and images are shuffled apart and dealt so that videos hold `video_token_share` of all tokens so
    far, to within a video, as long as both kinds last; what is left over of one kind fills the last
    batches. A sample larger than the budget makes a batch of its own.

    Args:
        samples: what there is.
        catalog: gives each sample its bucket.
        tokens_per_batch: token budget of a global batch, over all ranks.
        video_token_share: target share of video tokens; None takes that of the samples.
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

    def deal(self, epoch: int) -> list[Items]:
        """The batches of an epoch as (key, bucket) lists, in training order; always `num_batches` of them."""
        for attempt in range(_ATTEMPTS):
            batches = self._deal_freely(epoch, attempt)
            if self._reduce(batches):
                break
        else:  # the first epoch shows one way that fits
            batches = self._deal_freely(0)
            self._generator(epoch, _ATTEMPTS).shuffle(batches)
        while len(batches) < self.num_batches:
            largest = max((batch for batch in batches if len(batch) > 1), key=_tokens)
            batches.append([largest.pop() for _ in range(len(largest) // 2)])
        return batches

    def _reduce(self, batches: list[Items]) -> bool:
        """Spread the smallest batches over the room in others until `num_batches` are left, if that works."""
        while len(batches) > self.num_batches:
            smallest = min(batches, key=_tokens)
            batches.remove(smallest)
            for item in sorted(smallest, key=lambda item: -item[1].num_tokens):
                roomy = [b for b in batches if _tokens(b) + item[1].num_tokens <= self._budget]
                if not roomy:
                    return False
                max(roomy, key=_tokens).append(item)
        return True

    def _deal_freely(self, epoch: int, attempt: int = 0) -> list[Items]:
        items, generator = list(self._items), self._generator(epoch, attempt)
        if self._shuffle:
            generator.shuffle(items)
        videos = [item for item in reversed(items) if item[1].is_video]
        images = [item for item in reversed(items) if not item[1].is_video]
        share = _tokens(videos) / _tokens(items) if self._share is None else self._share
        batches: list[Items] = []
        owed = 0.0  # video tokens that the batches so far lack
        while videos or images:
            batches.append(self._next_batch(videos, images, owed + share * self._budget))
            owed += sum((share - bucket.is_video) * bucket.num_tokens for _, bucket in batches[-1])
        if self._shuffle:
            generator.shuffle(batches)
        return batches

    def _generator(self, epoch: int, attempt: int) -> random.Random:
        return random.Random(digest63(f"{self._seed}|{epoch}" + (f"|{attempt}" if attempt else "")))

    def _next_batch(self, videos: Items, images: Items, video_room: float) -> Items:
        """Take a batch off the ends of what is left, with about `video_room` tokens of videos."""
        batch: Items = []
        room = self._budget

        def fits(left: Items) -> bool:  # anything fits into an empty batch
            return bool(left) and (not batch or left[-1][1].num_tokens <= room)

        def take(left: Items) -> int:
            nonlocal room
            batch.append(left.pop())
            room -= batch[-1][1].num_tokens
            return batch[-1][1].num_tokens

        # Half a sample over the target is as good as half under it, and the next batches even it out.
        while fits(videos) and videos[-1][1].num_tokens / 2 <= video_room:
            video_room -= take(videos)
        while fits(images):
            take(images)
        while not images and fits(videos):
            take(videos)
        return batch

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
