"""Pictures of a run: one plan as in the paper's Fig. 2, and the loss over steps."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence as Rows
from pathlib import Path
from typing import TYPE_CHECKING

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.placement import GlobalBatch, Plan, Topology, build_schedule
from zellige_lightning.placement.schedule import split_blocks
from zellige_lightning.planner.cost import ProfileTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float, float]
_WARM, _COOL = "YlOrRd", "PuBu"  # videos, images


def prices_of(plan: Plan, batch: GlobalBatch, table: ProfileTable, topology: Topology) -> list[int]:
    """Price of each sequence on each rank that takes part, microseconds; the first of a split block carries
    the block's start."""
    prices = []
    for sequence, option in zip(batch.sequences, plan.options, strict=True):
        price = table.price_us(sequence.bucket, option.config, topology.class_of(option.ranks))
        if price is None:
            raise DataError(
                f"bucket {sequence.bucket.name!r} has no price for {option.config} on {option.ranks}",
                fix="show the plan with the profile that it was made from",
            )
        prices.append(price)
    for option, members in split_blocks(plan.options):
        prices[members[0]] += table.block_start_us(option, topology)
    return prices


def plan_picture(
    plan: Plan,
    batch: GlobalBatch,
    path: str | Path,
    prices_us: Rows[int] | None = None,
    caption: str = "",
) -> Path:
    """`plan_figure`, written to `path`."""
    return _save(plan_figure(plan, batch, prices_us, caption), path)


def plan_figure(
    plan: Plan, batch: GlobalBatch, prices_us: Rows[int] | None = None, caption: str = ""
) -> Figure:
    """Ranks as bars, stacked in execution order; warm segments are videos, cool ones images, splits hatched.

    Args:
        prices_us: price of each sequence per participating rank. Bars then show predicted time and the
            line is the proven load floor; without prices bars show tokens and the line is their mean.
        caption: a further line of the title, such as what the step sent.
    """
    figure, axes = _canvas(1.1 * plan.world_size + 3.0, 4.2)
    shades = _shades(batch)
    lengths = [sequence.num_tokens for sequence in batch.sequences]
    for rank in range(plan.world_size):
        bottom = 0.0
        for segment in build_schedule(plan.options, lengths, rank, plan.world_size).segments:
            height = float(len(segment)) if prices_us is None else prices_us[segment.sequence] / 1000
            axes.bar(
                rank,
                height,
                bottom=bottom,
                width=0.8,
                color=shades[batch.sequences[segment.sequence].bucket.name],
                edgecolor="black",
                linewidth=0.3,
                hatch=None if segment.option.config.is_whole else "////",
            )
            bottom += height
    floor = sum(lengths) / plan.world_size if prices_us is None else plan.lower_bound_us / 1000
    axes.axhline(floor, color="black", linestyle="--", linewidth=1.2)
    axes.set_xticks(range(plan.world_size))
    axes.set_xlabel("rank")
    axes.set_ylabel("tokens" if prices_us is None else "predicted time (ms)")
    title = f"{plan.planner}: batch {plan.step}, {len(lengths)} sequences, {plan.num_splits} split"
    axes.set_title(f"{title}\n{caption}" if caption else title)
    _legend(axes, shades, "mean" if prices_us is None else "load floor")
    return figure


def _shades(batch: GlobalBatch) -> dict[str, Colour]:
    """A colour for each bucket, darker where it has more tokens."""
    from matplotlib import colormaps

    shades: dict[str, Colour] = {}
    for is_video, colours in ((True, _WARM), (False, _COOL)):
        buckets = {s.bucket for s in batch.sequences if s.bucket.is_video is is_video}
        for i, bucket in enumerate(sorted(buckets, key=lambda b: (b.num_tokens, b.name))):
            shades[bucket.name] = colormaps[colours](0.3 + 0.5 * (i + 1) / len(buckets))
    return shades


def _legend(axes: Axes, shades: Mapping[str, Colour], floor_name: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, edgecolor="black", label=name) for name, colour in shades.items()
    ]
    handles.append(Patch(facecolor="white", edgecolor="black", hatch="////", label="split"))
    handles.append(Line2D([], [], color="black", linestyle="--", label=floor_name))
    axes.legend(handles=handles, fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def loss_curve(csv_path: str | Path, path: str | Path, columns: Rows[str] = ("loss",)) -> Path:
    """The named columns of a Lightning CSV log over its `step` column.

    Raises:
        DataError: the log is missing or has none of the columns.
    """
    if not Path(csv_path).is_file():
        raise DataError(f"there is no CSV log at {csv_path}", fix="add lightning.pytorch.loggers.CSVLogger")
    with open(csv_path, newline="") as file:
        rows = list(csv.DictReader(file))
    found = sorted({name for row in rows for name in row})
    points = {
        name: [(int(row["step"]), float(row[name])) for row in rows if row.get(name) not in (None, "")]
        for name in columns
    }
    if not any(points.values()):
        raise DataError(f"{csv_path} has no column of {list(columns)}", fix=f"it has {found}")
    figure, axes = _canvas(6.0, 3.6)
    for name, line in points.items():
        if line:
            axes.plot(*zip(*line, strict=True), label=name, linewidth=1.0)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    return _save(figure, path)


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("pictures need matplotlib", fix="pip install 'zellige-lightning[demo]'") from error
    # A figure of its own, without pyplot: no display, and no state shared with the user's pictures.
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Figure, path: str | Path) -> Path:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    return target
