"""Losses apart by bucket, added up over batches and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zellige_lightning.batch import PADDING_SEQUENCE, RankBatch
from zellige_lightning.placement import Bucket


class BucketLosses:
    """Sums of per-sample losses by bucket. Adding waits for no device; `total` is a collective."""

    def __init__(self) -> None:
        self._parts: list[tuple[list[Bucket], Tensor]] = []

    def add(self, batch: RankBatch, per_token: Tensor) -> None:
        """A part of a sample counts as that part of one; padding is none."""
        buckets, sums, shares = [], [], []
        parts = per_token.detach().split(batch.lengths)
        for part, segment, sequence in zip(parts, batch.segments, batch.sequences, strict=True):
            if sequence is not PADDING_SEQUENCE:
                buckets.append(sequence.bucket)
                sums.append(part.sum() / segment.num_tokens)
                shares.append(len(segment) / segment.num_tokens)
        if buckets:
            losses = torch.stack(sums).double()
            self._parts.append((buckets, torch.stack((losses, torch.tensor(shares).to(losses)))))

    def total(self) -> dict[str, tuple[bool, float, float]]:
        """Bucket -> (whether it is one of videos, sum of losses, samples), over all ranks. Starts anew."""
        mine: dict[str, Row] = {}
        for buckets, table in self._parts:
            for bucket, loss, share in zip(buckets, *table.tolist(), strict=True):
                _add(mine, (bucket.name, bucket.is_video, loss, share))
        self._parts = []
        total: dict[str, Row] = {}
        for row in (row for rows in _of_all_ranks(list(mine.values())) for row in rows):
            _add(total, row)
        return {name: row[1:] for name, row in sorted(total.items())}


Row = tuple[str, bool, float, float]


def _add(rows: dict[str, Row], row: Row) -> None:
    name, is_video, loss, count = row
    _, _, before, others = rows.get(name, (name, is_video, 0.0, 0.0))
    rows[name] = name, is_video, before + loss, others + count


def _of_all_ranks(rows: list[Row]) -> list[list[Row]]:
    """The rows of every rank, by rank. Each has buckets of its own, so that no tensor of one size will do."""
    if not dist.is_available() or not dist.is_initialized():
        return [rows]
    gathered: list[list[Row]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, rows)
    return gathered
