"""AdaptiveLoad's sampler form: how many sequences a rank draws follows from their length (paper, Sec. II-C;
arXiv 2605.17923).

It changes what a step trains on, so it is a way to make global batches, not to place them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Rows
from dataclasses import dataclass
from typing import Any

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement import Catalog
from zellige_lightning.planner.policies.adaptive_load import batch_sizes
from zellige_lightning.sources.base import Sample
from zellige_lightning.sources.sampler import GlobalBatchSampler, Items


@dataclass(frozen=True)
class AdaptiveLoad:
    """Settings of the sampler form.

    Args:
        exponent: p of the compute bound; `zellige-plan --json` fits it to a profile.
        ranks: shares in a global batch, each of one bucket. A setting of its own, so that a run may go on
            with another number of processes.
    """

    exponent: float
    ranks: int

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> AdaptiveLoad:
        """Raises: ConfigError for a missing, an unknown or an impossible setting."""
        if set(settings) != {"exponent", "ranks"}:
            raise ConfigError(
                f"adaptive_load has the settings {sorted(map(str, settings))}",
                fix="give `exponent` and `ranks`",
            )
        exponent, ranks = settings["exponent"], settings["ranks"]
        if not isinstance(exponent, int | float) or not 0 < exponent < 8:
            raise ConfigError(
                f"adaptive_load.exponent={exponent!r}", fix="compute grows as length^p: p is about 1 to 2"
            )
        if not isinstance(ranks, int) or ranks < 1:
            raise ConfigError(f"adaptive_load.ranks={ranks!r}", fix="the number of ranks, 1 or more")
        return cls(float(exponent), ranks)


class AdaptiveLoadSampler(GlobalBatchSampler):
    """Every rank's share of a global batch is B(S) sequences of one bucket of S tokens, with

    B(S) = max(1, min(M_mem / S, M_comp / S^p)).

    M_mem is `tokens_per_batch` over the ranks, M_comp the compute of the longest bucket at B = 1. Every
    sample appears once per epoch; the last share of a bucket may be smaller.
    """

    def __init__(
        self,
        samples: Rows[Sample],
        catalog: Catalog,
        settings: AdaptiveLoad,
        *,
        tokens_per_batch: int,
        seed: int = 0,
    ) -> None:
        super().__init__(samples, catalog, tokens_per_batch=tokens_per_batch, seed=seed)
        self._ranks = settings.ranks
        lengths = [bucket.num_tokens for bucket in self.buckets]
        sizes = batch_sizes(lengths, settings.exponent, tokens_per_batch // settings.ranks)
        self.batch_sizes = {bucket.name: size for bucket, size in zip(self.buckets, sizes, strict=True)}

    def _deal_freely(self, epoch: int, attempt: int = 0) -> list[Items]:
        items, generator = list(self._items), self._generator(epoch, attempt)
        generator.shuffle(items)
        shares: list[Items] = []
        for bucket in self.buckets:
            size, members = self.batch_sizes[bucket.name], [item for item in items if item[1] == bucket]
            shares += [members[i : i + size] for i in range(0, len(members), size)]
        generator.shuffle(shares)
        grouped = (shares[i : i + self._ranks] for i in range(0, len(shares), self._ranks))
        return [[item for share in group for item in share] for group in grouped]
