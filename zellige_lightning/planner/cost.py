"""What placements cost (paper, Sec. IV-B): the analytical memory model and the table of measured prices."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

from zellige_lightning.errors import ConfigError, ProfileError
from zellige_lightning.placement.plan import WHOLE, ParallelConfig, PlacementOption, rank_sums
from zellige_lightning.placement.schedule import split_blocks
from zellige_lightning.placement.sequence import Bucket
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner import profile_file
from zellige_lightning.planner.price_fit import PriceFit, fit_all

MIB = 1 << 20
PriceKey = tuple[str, ParallelConfig, str]
StartKey = tuple[ParallelConfig, str]


@dataclass(frozen=True)
class ModelGeometry:
    """What the memory model needs to know of the model; all bytes are per rank.

    Args:
        num_layers: transformer blocks.
        num_heads, head_dim: of self-attention; keys and values have as many heads as queries.
        element_bytes: bytes of one activation element.
        resident_bytes_per_token: kept from forward to backward over all layers, per local token. It
            depends on the checkpointing mode.
        transient_bytes_per_token: peak of one layer's (re)computation, per local token.
        bytes_per_sequence: kept per sequence, whatever its length (modulation, text).
        split_bytes_per_token: kept beyond that per local token of a split sequence (saved attention).
        step_bytes: taken by a step whatever its sequences; part of M_base.
        exchange_bytes_per_token: measured, by configuration: what a rank takes beyond its local tokens, per
            token of the whole sequence. Configurations that are not in it take Table II's K/V and buffers.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    element_bytes: int
    resident_bytes_per_token: int
    transient_bytes_per_token: int
    bytes_per_sequence: int
    split_bytes_per_token: int = 0
    step_bytes: int = 0
    exchange_bytes_per_token: tuple[tuple[ParallelConfig, int], ...] = ()

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, tuple):
                value = min((size for _, size in value), default=0)
            low = 0 if entry.name.endswith(("_token", "_sequence", "step_bytes")) else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"model geometry: {entry.name} = {value!r}", fix=f"an integer >= {low}")

    @property
    def kv_bytes_per_token(self) -> int:
        """`kv` of Table II: one key and one value over all heads."""
        return 2 * self.num_heads * self.head_dim * self.element_bytes


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


@dataclass(frozen=True)
class MemoryModel:
    """M = M_act + M_KV + M_buf for one participating rank (paper, Sec. IV-B), for the largest shard.

    The executor nests its axes: all-to-all over h, then all-gather of k/v over q, then a ring over k.
        Hence a rank
    holds k/v of L/k tokens and H/h heads, and each axis adds its own transient buffers. Where the engine was
    measured under a configuration, that stands in for M_KV and M_buf: buffers live only while few
    activations do, so that much of them costs nothing.
    """

    geometry: ModelGeometry

    def memory_mib(self, num_tokens: int, config: ParallelConfig) -> int:
        """MiB, rounded up, that `num_tokens` tokens under `config` take on one rank."""
        return _ceil(self.sequence_bytes(num_tokens, config), MIB)

    def sequence_bytes(self, num_tokens: int, config: ParallelConfig) -> int:
        """Bytes that `num_tokens` tokens under `config` take on one rank."""
        measured = self._exchanges.get(config)
        if measured is not None:
            return self.act_bytes(num_tokens, config) + measured * num_tokens
        held = self.act_bytes(num_tokens, config) + self.kv_bytes(num_tokens, config)
        return held + self.buffer_bytes(num_tokens, config)

    @cached_property
    def _exchanges(self) -> dict[ParallelConfig, int]:
        return dict(self.geometry.exchange_bytes_per_token)

    def act_bytes(self, num_tokens: int, config: ParallelConfig) -> int:
        """M_act: activations of the local shard."""
        g = self.geometry
        per_token = g.resident_bytes_per_token + g.transient_bytes_per_token
        per_token += 0 if config.is_whole else g.split_bytes_per_token
        return _ceil(num_tokens, config.degree) * per_token + g.bytes_per_sequence

    def kv_bytes(self, num_tokens: int, config: ParallelConfig) -> int:
        """M_KV, Table II: L kv for all-gather, L kv / h for Ulysses, L kv / k for ring, L kv / (h k)
        composed."""
        return _ceil(num_tokens, config.k) * _ceil(self.geometry.kv_bytes_per_token, config.h)

    def buffer_bytes(self, num_tokens: int, config: ParallelConfig) -> int:
        """M_buf: all-to-all input and output of packed q, k, v and the attention output's way back; the
        part of the gathered k/v that is received; two ring blocks (the one sent and the one received)."""
        kv, local = self.geometry.kv_bytes_per_token, _ceil(num_tokens, config.degree)
        gathered = self.kv_bytes(num_tokens, config)
        exchange = _ceil(7 * kv * local, 2) if config.h > 1 else 0  # 2 * (q, k, v) + o = 2 * 1.5 kv + 0.5 kv
        gather = _ceil(gathered * (config.q - 1), config.q)
        ring = 2 * gathered if config.k > 1 else 0
        return exchange + gather + ring


@dataclass(frozen=True)
class ProfileTable:
    """Prices of a catalog on one machine.

    Args:
        buckets: the profiled catalog.
        prices_us: (bucket name, config, topology class) -> price per participating rank, without the fixed
            part.
        extrapolated_us: whole-sequence prices of buckets that do not fit whole; only Eq. (4) and F use them.
        fixed_us: placement-independent cost of a step.
        fingerprint: what the prices depend on (model, devices, versions, world).
        spread_us: of the measured prices, how far a single measurement is from the median (half of them are
            closer); not every price has one.
        interpolated: prices that were not measured but taken from the fit, since the time budget had ended.
        start_us: (config, topology class) -> what a participating rank pays once for all sequences that are
            split over heads only and share a call, beside their prices; without an entry, nothing.
        split_scale, overhead_scale: what the correction by mixed plans made of a split sequence's share of
            the whole price, relative to the corrected whole price, and of its overhead beyond that share.

    Raises:
        ProfileError: a price that is not a positive integer, of an unknown bucket, a bucket without whole
            price, or a start of what shares no call.
    """

    buckets: tuple[Bucket, ...]
    prices_us: Mapping[PriceKey, int]
    extrapolated_us: Mapping[str, int]
    fixed_us: int
    fingerprint: Mapping[str, str | int | float]
    spread_us: Mapping[PriceKey, int] = field(default_factory=dict)
    interpolated: frozenset[PriceKey] = frozenset()
    start_us: Mapping[StartKey, int] = field(default_factory=dict)
    split_scale: float = 1.0
    overhead_scale: float = 1.0

    def __post_init__(self) -> None:
        profile_file.check(self)

    @cached_property
    def _grids(self) -> dict[str, tuple[int, int, int]]:
        return {bucket.name: bucket.grid for bucket in self.buckets}

    @cached_property
    def _fits(self) -> dict[tuple[ParallelConfig, str], PriceFit]:
        """Through the measured prices alone."""
        tokens = {b.name: b.num_tokens for b in self.buckets}
        points: dict[tuple[ParallelConfig, str], list[tuple[int, int]]] = {}
        for key, price in self.prices_us.items():
            if key not in self.interpolated:
                points.setdefault(key[1:], []).append((tokens[key[0]], price))
        return fit_all(points)

    @cached_property
    def classes(self) -> tuple[tuple[ParallelConfig, str], ...]:
        """The (config, topology class) pairs that any bucket has a price for, by degree."""
        return tuple(sorted(self._fits, key=lambda key: (key[0].degree, key)))

    def is_adhoc(self, bucket: Bucket) -> bool:
        """Not a bucket of the profiled catalog (the shape decides, not the name alone)."""
        return self._grids.get(bucket.name) != bucket.grid

    def price_us(self, bucket: Bucket, config: ParallelConfig, topology_class: str) -> int | None:
        """Price per participating rank; None where this is not an option. Ad-hoc buckets are interpolated."""
        if not self.is_adhoc(bucket):
            return self.prices_us.get((bucket.name, config, topology_class))
        fit = self._fits.get((config, topology_class))
        return None if fit is None else fit.price_us(bucket.num_tokens)

    def is_measured(self, bucket: Bucket, config: ParallelConfig, topology_class: str) -> bool:
        """Whether the price of this option was measured, and not taken from the fit."""
        key = bucket.name, config, topology_class
        return not self.is_adhoc(bucket) and key in self.prices_us and key not in self.interpolated

    def whole_us(self, bucket: Bucket) -> int:
        """Whole-sequence price: measured, else extrapolated; interpolated for ad-hoc buckets.

        Raises:
            ProfileError: an ad-hoc bucket and no bucket of the catalog was measured whole.
        """
        price = self.price_us(bucket, WHOLE, "node")
        if price is None and not self.is_adhoc(bucket):
            price = self.extrapolated_us[bucket.name]
        if price is None:
            raise ProfileError(
                f"no bucket of the profile has a whole-sequence price to interpolate {bucket.name!r} from",
                fix="add a bucket that fits on one rank to the catalog and profile again",
            )
        return price

    def attention_us(self, bucket: Bucket) -> float:
        """The part of the whole-sequence price that grows with the square of the tokens; all of it where the
        profile tells no parts apart."""
        fit = self._fits.get((WHOLE, "node"))
        quadratic = 0.0 if fit is None else fit.gamma * bucket.num_tokens**2
        return quadratic or float(self.whole_us(bucket))

    def block_start_us(self, option: PlacementOption, topology: Topology) -> int:
        """What each rank of a split block pays beside the prices of its sequences."""
        return self.start_us.get((option.config, topology.class_of(option.ranks)), 0)

    def start_loads_us(self, options: Iterable[PlacementOption], topology: Topology) -> list[int]:
        """The same of all split blocks of a placement, per rank of the world."""
        blocks = [option for option, _ in split_blocks(options)] if self.start_us else []
        starts = [self.block_start_us(option, topology) for option in blocks]
        return list(rank_sums(blocks, starts, topology.world_size))

    def overhead_us(self, bucket: Bucket, option: PlacementOption, topology: Topology) -> float:
        """What a rank that shares the sequence pays beyond its share of the work, with nothing beside it that
        would hide exchanges: what there is to hide."""
        price = self.price_us(bucket, option.config, topology.class_of(option.ranks)) or 0
        share = self.split_scale * self.whole_us(bucket) / option.config.degree
        return max(0.0, price - share) / self.overhead_scale

    @cached_property
    def version(self) -> str:
        """Short digest of everything a plan may depend on; the fingerprint is not part of it."""
        return hashlib.sha256(profile_file.price_text(self).encode()).hexdigest()[:12]

    def to_json(self) -> str:
        return profile_file.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> ProfileTable:
        """Raises: ProfileError where the text is not a profile."""
        return cls(**profile_file.parse(text))

    def save(self, path: str | Path) -> None:
        """Writes the file atomically: a reader sees the old file or the new one, never a part."""
        profile_file.write_atomically(Path(path), self.to_json())

    @classmethod
    def load(
        cls, path: str | Path, expected_fingerprint: Mapping[str, str | int | float] | None = None
    ) -> ProfileTable:
        """The table in `path`.

        Raises:
            ProfileError: missing, too large, damaged, or of another job (names the keys that differ).
        """
        table = cls.from_json(profile_file.read(Path(path)))
        if expected_fingerprint is not None:
            profile_file.check_fingerprint(table.fingerprint, expected_fingerprint, str(path))
        return table
