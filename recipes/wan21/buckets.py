"""Which shape a medium gets: a catalog of resolutions x frame counts x aspect ratios, and the choice from it.

The rules, in order:

1. A resolution is open to a medium whose area in pixels is at least `min_area` of the resolution's own.
2. The largest open resolution that has a frame count for it is taken: 1 for an image; for a video the largest
   count above 1 that its length allows at `fps` (`repeat_last` frames may be missing at the end).
3. Of the resolution's aspect ratios the nearest is taken, by the ratio of ratios.
4. The picture is scaled to cover the shape, and what stands out is cut off, at most `max_crop` of its area.

Sides are rounded up to multiples of 16 pixels: 1080 rows become 1088.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.placement import Bucket
from zellige_lightning.recipes.wan21.clips import SAMPLE_FPS
from zellige_lightning.recipes.wan21.demo_media import bucket_of
from zellige_lightning.recipes.wan21.patchify import PIXELS_PER_TOKEN, check_num_frames
from zellige_lightning.recipes.wan21.pictures import covering_size

Size = tuple[int, int]


class Unfit(DataError):
    """The medium is intact and suits no bucket."""


@dataclass(frozen=True)
class Resolution:
    """Shapes of about one area, that of `size` (height, width); `frames` are 4n+1, rising."""

    name: str
    size: Size
    frames: tuple[int, ...]

    @property
    def area(self) -> int:
        return self.size[0] * self.size[1]


@dataclass(frozen=True)
class Shape:
    """What a medium is brought to, in frames and pixels."""

    resolution: str
    frames: int
    height: int
    width: int

    @property
    def bucket(self) -> Bucket:
        return bucket_of(self.frames, self.height, self.width)


@dataclass(frozen=True)
class BucketRules:
    """A catalog, and what is allowed to make media fit it.

    Args:
        aspect_ratios: width over height; each resolution has a shape of its area for each of them.
        fps: frames per second after re-timing.
        min_area: of a medium, over the area of a resolution.
        max_crop: share of a picture's area that may be cut off.
        repeat_last: frames that a video may lack at the end; its last picture is repeated.
    """

    resolutions: tuple[Resolution, ...]
    aspect_ratios: tuple[float, ...]
    fps: float = SAMPLE_FPS
    min_area: float = 0.8
    max_crop: float = 0.4
    repeat_last: int = 1

    def __post_init__(self) -> None:
        if not self.resolutions or not self.aspect_ratios:
            raise ConfigError("the buckets have no resolution or no aspect ratio", fix="name one of each")
        if min(self.aspect_ratios) <= 0.0 or self.fps <= 0.0 or self.min_area <= 0.0 or self.repeat_last < 0:
            raise ConfigError("a number of the bucket rules is not positive", fix="see conf/data/buckets")
        if not 0.0 <= self.max_crop < 1.0:
            raise ConfigError(f"max_crop={self.max_crop}", fix="give a share between 0 and 1")
        for resolution in self.resolutions:
            for frames in resolution.frames:
                check_num_frames(frames, f"resolution {resolution.name}")

    def sizes(self, resolution: Resolution) -> list[Size]:
        """(height, width) of each aspect ratio. The own size, turned as well, stands for its ratio."""
        height, width = resolution.size
        own = {width / height: (height, width), height / width: (width, height)}
        sizes = []
        for ratio in self.aspect_ratios:
            near = [size for r, size in own.items() if abs(math.log(r / ratio)) < 0.05]
            size = (
                near[0] if near else (math.sqrt(resolution.area / ratio), math.sqrt(resolution.area * ratio))
            )
            sizes.append((_ceil(size[0]), _ceil(size[1])))
        return list(dict.fromkeys(sizes))

    def shapes(self) -> list[Shape]:
        """The whole catalog."""
        return [
            Shape(resolution.name, frames, *size)
            for resolution in self.resolutions
            for frames in resolution.frames
            for size in self.sizes(resolution)
        ]

    def choose(self, height: int, width: int, num_frames: int, *, is_video: bool) -> Shape:
        """The shape for a medium of that size, with square pixels, and that many frames at `fps`.

        Raises:
            Unfit: saying which rule leaves no shape.
        """
        ordered = sorted(self.resolutions, key=lambda r: r.area, reverse=True)
        open_to = [r for r in ordered if height * width >= self.min_area * r.area]
        if not open_to:
            raise Unfit(f"fewer pixels than {self.min_area:g} of {ordered[-1].name} ({height}x{width})")
        for resolution in open_to:
            frames = [n for n in resolution.frames if self._allows(n, num_frames, is_video)]
            if frames:
                size = self._nearest(resolution, height, width)
                return Shape(resolution.name, max(frames), *size)
        raise Unfit(self._no_frames(open_to, num_frames, is_video))

    def _allows(self, frames: int, available: int, is_video: bool) -> bool:
        return 1 < frames <= available + self.repeat_last if is_video else frames == 1

    def _no_frames(self, open_to: list[Resolution], num_frames: int, is_video: bool) -> str:
        names = ", ".join(r.name for r in open_to)
        counts = sorted({n for r in open_to for n in r.frames if n > 1})
        if not is_video or not counts:
            return f"{names} take no {'videos' if is_video else 'images'}"
        return f"shorter than {counts[0]} frames, the least of {names} ({num_frames} at {self.fps:g} fps)"

    def _nearest(self, resolution: Resolution, height: int, width: int) -> Size:
        sizes = self.sizes(resolution)
        size = min(sizes, key=lambda s: abs(math.log((s[1] / s[0]) / (width / height))))
        if (share := crop_share((height, width), size)) > self.max_crop:
            cut = f"{share:.0%} of {height}x{width} for {size[0]}x{size[1]}"
            raise Unfit(f"more than {self.max_crop:.0%} would be cut off ({cut})")
        return size

    def only(self, names: list[str]) -> BucketRules:
        """The same with only these resolutions. Raises: ConfigError for a name that there is not."""
        known = {r.name: r for r in self.resolutions}
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(
                f"no resolution is called {unknown[0]!r}", fix=f"choose from {', '.join(known)}"
            )
        return BucketRules(tuple(known[name] for name in names), **self._numbers())

    def _numbers(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "resolutions"}

    @property
    def settings(self) -> dict[str, Any]:
        """What the pixels of a sample depend on; JSON types, part of the identity of a store."""
        resolutions = {r.name: [list(r.size), list(r.frames)] for r in self.resolutions}
        return {"resolutions": resolutions, **self._numbers(), "aspect_ratios": list(self.aspect_ratios)}


def crop_share(source: Size, target: Size) -> float:
    """Share of the source's area that covering `target` cuts off."""
    height, width = covering_size(source, target)
    return 1.0 - target[0] * target[1] / (height * width)


def _ceil(pixels: float) -> int:
    return math.ceil(pixels / PIXELS_PER_TOKEN - 1e-9) * PIXELS_PER_TOKEN


def load_rules(name: str) -> BucketRules:
    """Bucket rules by the name of a file in `conf/data/buckets`, or by the path of a YAML file of one's own.

    Raises:
        ConfigError: no such file, or one that is not understood.
    """
    folder = resources.files("zellige_lightning.conf") / "data" / "buckets"
    own = Path(name)
    file = own if own.suffix in (".yaml", ".yml") else folder / f"{name}.yaml"
    if not file.is_file():
        known = sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))
        raise ConfigError(
            f"no buckets are called {name!r}", fix=f"choose {', '.join(known)} or give a .yaml file"
        )
    try:
        entries = OmegaConf.to_container(OmegaConf.create(file.read_text()), resolve=True)
        return rules_from(entries if isinstance(entries, dict) else {})
    except (OmegaConfBaseException, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"buckets {name!r} are not understood: {error!r}", fix="see conf/data/buckets"
        ) from error


def rules_from(entries: Mapping[Any, Any]) -> BucketRules:
    """From the entries of such a file. Ratios are written `16:9`, frame counts as numbers or as `17..81`."""
    resolutions = tuple(
        Resolution(str(name), (int(node["size"][0]), int(node["size"][1])), _frame_counts(node["frames"]))
        for name, node in entries["resolutions"].items()
    )
    ratios = tuple(_ratio(str(text)) for text in entries["aspect_ratios"])
    numbers = {k: v for k, v in entries.items() if k not in ("resolutions", "aspect_ratios")}
    return BucketRules(resolutions, ratios, **numbers)


def _frame_counts(values: list[Any]) -> tuple[int, ...]:
    counts: set[int] = set()
    for value in values:
        if ends := re.fullmatch(r"(\d+)\.\.(\d+)", str(value)):
            counts |= set(range(int(ends[1]), int(ends[2]) + 1, 4))
        else:
            counts.add(int(value))
    return tuple(sorted(counts))


def _ratio(text: str) -> float:
    width, _, height = text.partition(":")
    return float(width) / float(height or 1.0)
