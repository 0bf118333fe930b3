"""What becomes of each medium, and why: the rows of the table that `zellige-inspect` prints."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence as Rows
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.buckets import BucketRules, Shape, Unfit, crop_share
from zellige_lightning.recipes.wan21.clips import decode_clip
from zellige_lightning.recipes.wan21.manifest import UNFIT, UNREADABLE, MediaItem, Skip
from zellige_lightning.recipes.wan21.pictures import covering_size, decode_image, fit
from zellige_lightning.recipes.wan21.probe import Caps, Probe, probe

_LISTED = 1000  # lines of a list in a message


@dataclass(frozen=True)
class Decision:
    """One row. Sizes are (height)x(width) as text; what does not apply is empty.

    Args:
        bucket: where it goes; empty if it is skipped, for `reason`, which is of a `kind` of manifest.py.
        source, source_fps, source_frames: of the file. frames_retimed: at `target_fps`.
        frames_kept: of those.
        resized, cropped: the scaling, and the share of the area that is cut off.
    """

    name: str
    key: str = ""
    bucket: str = ""
    reason: str = ""
    kind: str = ""
    source: str = ""
    source_fps: float = 0.0
    source_frames: int = 0
    target_fps: float = 0.0
    frames_retimed: int = 0
    frames_kept: int = 0
    height: int = 0
    width: int = 0
    resized: str = ""
    cropped: str = ""
    notes: str = ""

    @property
    def kept(self) -> bool:
        return bool(self.bucket)

    @property
    def shape(self) -> Shape:
        return Shape("", self.frames_kept, self.height, self.width)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """For people."""
        if not self.kept:
            return f"{self.name}: skipped: {self.reason}"
        time = ""
        if self.source_fps:
            time = (
                f", {self.source_frames} frames at {self.source_fps:.4g} fps -> {self.frames_retimed} at"
                f" {self.target_fps:g} fps, {self.frames_kept} kept"
            )
        extra = "".join(f", {part}" for part in (self.resized, self.cropped, self.notes) if part)
        return f"{self.name}: {self.bucket}: {self.source}{time}{extra}"


def skipped(skip: Skip) -> Decision:
    """The row of something that the listing left out already."""
    return Decision(skip.name, reason=skip.reason, kind=skip.kind)


def decide(item: MediaItem, rules: BucketRules, caps: Caps) -> tuple[Decision, Probe | None]:
    """Never raises for what is wrong with a medium: that is a decision too."""
    try:
        found = probe(item, caps, rules.fps)
    except (DataError, OSError) as error:
        return refused(item, error), None
    known = {
        "source": f"{found.height}x{found.width}",
        "source_fps": found.source_fps,
        "source_frames": found.source_frames,
        "target_fps": rules.fps if found.is_video else 0.0,
        "frames_retimed": found.num_frames,
    }
    try:
        shape = rules.choose(found.height, found.width, found.num_frames, is_video=found.is_video)
    except Unfit as error:
        reason = _with_rates(error.message, found, rules)
        return Decision(item.name, item.key, reason=reason, kind=UNFIT, **known), found  # type: ignore[arg-type]
    return Decision(item.name, item.key, shape.bucket.name, **known, **_fitting(found, shape)), found  # type: ignore[arg-type]


def refused(item: MediaItem, error: Exception) -> Decision:
    """The row of a medium that cannot be read."""
    reason = error.message if isinstance(error, DataError) else str(error)
    for prefix in ("clip", "image"):
        reason = reason.removeprefix(f"{prefix} {item.name!r} ")  # the row names it already
    return Decision(item.name, item.key, reason=reason, kind=UNREADABLE)


def _with_rates(reason: str, found: Probe, rules: BucketRules) -> str:
    if not found.is_video:
        return reason
    source = f"{found.source_frames} frames at {found.source_fps:.4g} fps"
    return f"{reason} (the file: {source}; re-timed to {rules.fps:g} fps: {found.num_frames})"


def _fitting(found: Probe, shape: Shape) -> dict[str, Any]:
    source, target = (found.height, found.width), (shape.height, shape.width)
    covering, share = covering_size(source, target), crop_share(source, target)
    notes = list(found.notes)
    if found.pixel_aspect != 1.0:
        notes.append(f"pixels of {found.pixel_aspect:.3f}:1 made square")
    if found.is_video and shape.frames > found.num_frames:
        notes.append(f"last picture held for {shape.frames - found.num_frames} frame more")
    if found.is_video and shape.frames > found.source_frames:
        notes.append("pictures repeated to reach the frame rate")
    return {
        "frames_kept": shape.frames,
        "height": shape.height,
        "width": shape.width,
        "resized": "" if covering == source else f"resized to {covering[0]}x{covering[1]}",
        "cropped": f"cropped to {target[0]}x{target[1]} ({share:.1%} cut off)" if covering != target else "",
        "notes": "; ".join(notes),
    }


def read_pixels(item: MediaItem, decision: Decision, found: Probe, rules: BucketRules, caps: Caps) -> Tensor:
    """`[3, F, H, W]` uint8 of a medium that was kept. Raises: DataError if it cannot be decoded after all."""
    size = decision.height, decision.width
    with item.open() as file:
        if not found.is_video:
            return fit(decode_image(file, item.name), *size)
        return decode_clip(
            file,
            decision.frames_kept,
            start_s=item.start_s,
            fps=rules.fps,
            size=size,
            name=item.name,
            container=found.content.container,
            pixel_aspect=found.pixel_aspect,
            repeat_last=rules.repeat_last,
            max_pixels=caps.max_pixels,
        )


def summary(decisions: Iterable[Decision]) -> str:
    """One line for each bucket, then one for each reason."""
    decisions = list(decisions)
    kept = [d for d in decisions if d.kept]
    lines = [f"{len(decisions)} entries: {len(kept)} kept, {len(decisions) - len(kept)} skipped", ""]
    counts = Counter(d.bucket for d in kept)
    shapes = {d.bucket: d.shape.bucket for d in kept}
    lines.append(f"{'bucket':<28} {'samples':>8} {'tokens each':>12} {'tokens':>14}")
    for name, bucket in sorted(shapes.items(), key=lambda entry: (entry[1].num_tokens, entry[0])):
        total = counts[name] * bucket.num_tokens
        lines.append(f"{name:<28} {counts[name]:>8} {bucket.num_tokens:>12,} {total:>14,}")
    reasons = Counter((d.kind, _general(d.reason)) for d in decisions if not d.kept)
    lines += [""] if reasons else []
    lines += [f"skipped {n:>6}  {kind}: {reason}" for (kind, reason), n in reasons.most_common()]
    return "\n".join(lines)


def _general(reason: str) -> str:
    """The reason without the numbers of one file, so that equal reasons are counted together."""
    return reason.partition(" (")[0] if "(" in reason else reason


def to_csv(decisions: Rows[Decision]) -> str:
    """The table for machines."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Decision)])
    writer.writeheader()
    writer.writerows(d.to_json() for d in decisions)
    return text.getvalue()


def check_unreadable(decisions: Iterable[Decision], total: int, limit: float) -> None:
    """Raises `DataError` with the list if more than `limit` of `total` media cannot be read."""
    bad = [d for d in decisions if d.kind == UNREADABLE]
    if len(bad) > limit * total:
        listed = "\n".join(f"    {d.name}: {d.reason}" for d in bad[:_LISTED])
        listed += f"\n    and {len(bad) - _LISTED} more" if len(bad) > _LISTED else ""
        raise DataError(
            f"{len(bad)} of {total} media cannot be read, more than the limit of {limit:.2%}:\n{listed}",
            fix="repair or remove these files, or raise --max-unreadable",
        )
