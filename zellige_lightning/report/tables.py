"""Tables of a run as plain text, so that they read the same in a terminal and in a log file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Rows
from dataclasses import dataclass

from zellige_lightning.placement import Bucket
from zellige_lightning.placement.plan import WHOLE
from zellige_lightning.planner.cost import ProfileTable
from zellige_lightning.planner.cut import CatalogCut
from zellige_lightning.report.records import StepRecord


@dataclass(frozen=True)
class Table:
    """Cells are text; the first column is aligned left, all others right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __str__(self) -> str:
        grid = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in grid) for i in range(len(self.columns))]
        lines = ["  ".join(_aligned(row, widths)).rstrip() for row in grid]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self.title, *lines, *([self.note] if self.note else [])])


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    first, *others = zip(row, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:.2f}"


def bucket_table(table: ProfileTable, cut: CatalogCut, counts: Mapping[str, int] | None = None) -> Table:
    """The catalog by ascending whole price, with the side of the cut (paper, Eq. (4)) that each bucket is on.

    Args:
        counts: samples by bucket name, where known.
    """

    def row(bucket: Bucket) -> tuple[str, ...]:
        return (
            bucket.name,
            "video" if bucket.is_video else "image",
            "x".join(map(str, bucket.grid)),
            str(bucket.num_tokens),
            str((counts or {}).get(bucket.name, "-")),
            _ms(table.whole_us(bucket)),
            _origin(table, bucket),
            "anchor" if cut.is_anchor(table, bucket) else "filler",
        )

    buckets = sorted(table.buckets, key=lambda b: (table.whole_us(b), b.num_tokens, b.name))
    return Table(
        "Buckets (whole price in ms)",
        ("bucket", "kind", "grid", "tokens", "samples", "whole", "price", "cut"),
        tuple(map(row, buckets)),
        f"Eq. (4): a bucket above {_ms(cut.threshold_us)} ms is an anchor and may be split.",
    )


def _origin(table: ProfileTable, bucket: Bucket) -> str:
    if bucket.name in table.extrapolated_us:
        return "extrapolated"
    return "measured" if table.is_measured(bucket, WHOLE, "node") else "interpolated"


def profile_table(table: ProfileTable) -> Table:
    """Prices per participating rank in ms; `-` is not an option, `~` was not measured but interpolated."""

    def cell(bucket: Bucket, column: int) -> str:
        price = table.price_us(bucket, *table.classes[column])
        if price is None:
            return "-"
        return _ms(price) if table.is_measured(bucket, *table.classes[column]) else f"~{_ms(price)}"

    rows = tuple(
        (bucket.name, *(cell(bucket, i) for i in range(len(table.classes))))
        for bucket in sorted(table.buckets, key=lambda b: (b.num_tokens, b.name))
    )
    marked = f", ~ {len(table.interpolated)} interpolated" if table.interpolated else ""
    names = tuple(f"{config}" if where == "node" else f"{config}@{where}" for config, where in table.classes)
    return Table(
        "Profile (ms per participating rank, by (q,h,k))",
        ("bucket", *names),
        rows,
        f"fixed step cost {_ms(table.fixed_us)} ms{_starts(table)}, prices {table.version}{marked}",
    )


def _starts(table: ProfileTable) -> str:
    rows = [f"{config}@{where} {_ms(us)}" for (config, where), us in sorted(table.start_us.items())]
    return f", start of a call in ms: {', '.join(rows)}" if rows else ""


_STEP_COLUMNS = (
    "batch",
    "images",
    "videos",
    "tokens",
    "splits",
    "predicted",
    "measured",
    "error %",
    "imbalance",
    "measured",
    "plan",
    "exposed",
)


def step_table(records: Rows[StepRecord], limit: int = 20) -> Table:
    """Predicted and measured makespan side by side (ms), at most `limit` rows, evenly spread over the run."""
    every = -(-len(records) // limit) if records else 1
    note = f"every {every}. of {len(records)} batches; all are in the CSV log" if every > 1 else ""
    return Table(
        "Batches (times in ms; imbalance is largest over mean rank time, predicted and measured)",
        _STEP_COLUMNS,
        tuple(map(_step_row, records[::every])),
        note,
    )


def _step_row(record: StepRecord) -> tuple[str, ...]:
    videos = sum(sequence.bucket.is_video for sequence in record.batch.sequences)
    return (
        str(record.step),
        str(len(record.batch.sequences) - videos),
        str(videos),
        str(record.batch.num_tokens),
        str(record.num_splits),
        _ms(record.predicted_us),
        _ms(record.measured_us),
        f"{record.error_pct:.1f}",
        f"{record.imbalance:.3f}",
        f"{record.measured_imbalance:.3f}",
        f"{record.solve_ms:.1f}",
        f"{record.exposed_ms:.1f}",
    )
