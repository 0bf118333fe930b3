"""What is known of one global batch after it ran, and the figures of a run made of these."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from zellige_lightning.placement import GlobalBatch, Plan

if TYPE_CHECKING:  # plans are drawn where torch is not installed as well
    from zellige_lightning.engine.counters import Counters


@dataclass(frozen=True)
class StepRecord:
    """One planned global batch, as predicted and as measured. The same on every rank.

    Args:
        step: number of the global batch.
        batch: what was placed; plan: where, of the longest wave if it took several.
        predicted_us: largest predicted rank load plus the fixed step cost.
        measured_us: the slowest rank's own time in forward and backward.
        imbalance, measured_imbalance: largest over mean rank time, predicted and measured (1.0 is ideal).
        num_splits: sequences that run on more than one rank.
        solve_ms: time to plan, model build included.
        exposed_ms: the part of planning and its exchange that training waited for.
        num_waves: planned parts that the batch was trained in, one after the other.
        wave: the part that `plan` places; None where the batch is trained at once.
        hit_rate: share of batches so far whose plan came from the cache.
        counters: of the engine, by rank, over forward and backward of all waves.
    """

    step: int
    batch: GlobalBatch
    plan: Plan
    predicted_us: int
    measured_us: int
    imbalance: float
    measured_imbalance: float
    num_splits: int
    solve_ms: float
    exposed_ms: float
    num_waves: int = 1
    wave: GlobalBatch | None = None
    hit_rate: float = 0.0
    counters: tuple[Counters, ...] = ()

    @property
    def bytes_sent(self) -> int:
        """Attention bytes of all ranks, forward and backward."""
        return sum(one.total_bytes for one in self.counters)

    @property
    def network_bytes(self) -> int:
        """The part of `bytes_sent` that left a node."""
        return sum(one.link_bytes["network"] for one in self.counters)

    def bytes_of(self, kind: str) -> int:
        """The part of `bytes_sent` that is of one kind, see `engine.counters.KINDS`."""
        return sum(one.bytes_sent[kind] for one in self.counters)

    @property
    def collectives(self) -> int:
        """Exchanges of the rank that took part in most."""
        return max((sum(one.exchanges.values()) for one in self.counters), default=0)

    @property
    def kernel_calls(self) -> int:
        """Attention kernels of the rank that called most."""
        return max((sum(one.kernel_calls.values()) for one in self.counters), default=0)

    @property
    def exchanged(self) -> str:
        """What the step sent and called, in one line."""
        megabytes = f"{self.bytes_sent / 1e6:.3g} MB sent, {self.network_bytes / 1e6:.3g} between nodes"
        return f"{megabytes}; at most {self.collectives} exchanges and {self.kernel_calls} kernels on a rank"

    @property
    def placed(self) -> GlobalBatch:
        """What `plan` places."""
        return self.wave or self.batch

    @property
    def keys(self) -> tuple[str, ...]:
        """The samples of the batch."""
        return tuple(sequence.key for sequence in self.batch.sequences)

    @property
    def error_pct(self) -> float:
        """Absolute percentage error of the predicted makespan."""
        return 100.0 * abs(self.predicted_us - self.measured_us) / self.measured_us


def summary(records: Rows[StepRecord]) -> dict[str, float]:
    """Figures of a run. The first record is left out of times and waiting: its planning cannot be hidden
    behind a step before it, and it pays for warm-up. With fewer than two records there is nothing left to
    average.

    Returns:
        global_batches, splits_total, distinct_batches over all records; makespan_mape_pct, imbalance_mean
        (measured), solve_ms_mean and exposed_planning_pct (100 x exposed / planning time) over all but the
        first.
    """
    warm = records[1:]
    planning_ms = sum(record.solve_ms for record in warm)
    exposed_ms = sum(record.exposed_ms for record in warm)
    figures: dict[str, float] = {
        "global_batches": len(records),
        "splits_total": sum(record.num_splits for record in records),
        "distinct_batches": len({frozenset(record.keys) for record in records}),
    }
    if warm:
        figures |= {
            "makespan_mape_pct": fmean(record.error_pct for record in warm),
            "imbalance_mean": fmean(record.measured_imbalance for record in warm),
            "solve_ms_mean": planning_ms / len(warm),
            "exposed_planning_pct": 100.0 * exposed_ms / planning_ms if planning_ms else 0.0,
        }
    return figures
