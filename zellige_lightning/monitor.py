"""`MakespanMonitor`: predicted and measured step makespan side by side, in every log."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from zellige_lightning.engine.counters import KINDS
from zellige_lightning.report.records import StepRecord


class MakespanMonitor(Callback):
    """Records every planned step and logs it. The strategy attaches one by itself.

    Attributes:
        records: one per global batch, the same on every rank.
    """

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        from zellige_lightning.placing import PlacingStrategy

        strategy = trainer.strategy
        if not isinstance(strategy, PlacingStrategy) or strategy.planned_step is None:
            return
        record = strategy.finish_step()
        self.records.append(record)
        strategy.services.end_trace(lambda: trainer.log_dir or trainer.default_root_dir)
        if trainer.barebones:
            return
        bar = {
            "mk": record.measured_us / 1e6,  # measured makespan, seconds
            "imb": record.measured_imbalance,
            "plan_ms": record.solve_ms,
        }
        pl_module.log_dict(bar, prog_bar=True, logger=False, batch_size=1, sync_dist=False)
        figures = {
            "makespan_pred_s": record.predicted_us / 1e6,
            "makespan_s": record.measured_us / 1e6,
            "makespan_error_pct": record.error_pct,
            "imbalance": record.measured_imbalance,
            "splits": float(record.num_splits),
            "waves": float(record.num_waves),
            "gap_pct": 100.0 * min(record.plan.gap, 10.0),  # certified; 1000 where nothing was proven
            "plan_cache_hit_rate": record.hit_rate,
            "price_changes": float(strategy.services.prices.num_changes),
            "solve_ms": record.solve_ms,
            "exposed_ms": record.exposed_ms,
            "bytes_mb": record.bytes_sent / 1e6,  # all ranks, forward and backward
            "network_mb": record.network_bytes / 1e6,
            **{f"{kind}_mb": record.bytes_of(kind) / 1e6 for kind in KINDS},
            "collectives": float(record.collectives),
            "kernel_calls": float(record.kernel_calls),
            "communicators": float(strategy.services.groups.communicators),
        }
        named = {f"zellige/{name}": value for name, value in figures.items()}
        pl_module.log_dict(named, batch_size=1, sync_dist=False)
