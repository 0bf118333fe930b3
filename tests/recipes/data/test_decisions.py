"""Decisions on real and damaged media: kept frames, sizes, and reasons that name the cause."""

from __future__ import annotations

import re
from pathlib import Path

import av
import pytest
import torch
from PIL import Image

from tests.recipes.data.files import (
    CAPS,
    decided,
    fast_start,
    item_of,
    pixels_of,
    real_clip,
    real_images,
    rules,
    turned_clockwise,
    with_header_count,
    write_clip,
    write_image,
)
from zellige_lightning.errors import ConfigError
from zellige_lightning.recipes.wan21.buckets import load_rules
from zellige_lightning.recipes.wan21.decision import (
    decide,
)
from zellige_lightning.recipes.wan21.decoder import Decoder
from zellige_lightning.recipes.wan21.media import fit
from zellige_lightning.recipes.wan21.probe import Caps

# ---- real media ----


def test_real_clips_with_the_published_buckets() -> None:
    wan = load_rules("wan21")
    bikes, bunny, phone = (
        decided(real_clip(name), wan) for name in ("bikes.mp4", "bigbuckbunny.mp4", "carphone_pristine.mp4")
    )
    assert (bikes.source_fps, bikes.source_frames, bikes.frames_retimed) == (25.0, 250, 160)
    assert bikes.bucket == "video-81x192x352"
    assert (bunny.source_frames, bunny.frames_retimed, bunny.frames_kept) == (132, 84, 81)
    assert bunny.bucket == "video-81x720x1280"
    assert bunny.resized == bunny.cropped == ""
    assert not phone.kept
    assert phone.kind == "unfit"
    assert "fewer pixels than 0.8 of 256p (144x193)" in phone.reason
    assert "120 frames at 29.97 fps; re-timed to 16 fps: 64" in phone.reason


def test_real_images_in_many_shapes() -> None:
    wan = load_rules("wan21")
    found = {path.stem: decided(path, wan).bucket for path in real_images()}
    assert found == {
        "astronaut": "image-256x256",
        "coffee": "image-224x304",
        "camera": "image-256x256",
        "chelsea": "image-224x304",
        "china": "image-224x304",
        "grace_hopper": "image-304x224",
    }


def test_160_frames_fill_a_bucket_of_161_by_holding_the_last_picture() -> None:
    wanted = rules((1, 161), (64, 160))
    item = item_of(real_clip("bikes.mp4"))
    decision = decide(item, wanted, CAPS)[0]
    assert (decision.frames_retimed, decision.frames_kept) == (160, 161)
    assert "last picture held for 1 frame more" in decision.notes
    pixels = pixels_of(item, wanted)
    assert pixels.shape == (3, 161, 64, 160)
    with av.open(str(real_clip("bikes.mp4"))) as container:
        last = list(container.decode(video=0))[-1].to_ndarray(format="rgb24")
    assert torch.equal(pixels[:, 160:], fit(torch.from_numpy(last).permute(2, 0, 1)[:, None], 64, 160))


def test_29_97_frames_per_second_take_the_nearest_picture() -> None:
    wanted = rules((5, 61), (144, 192))
    item = item_of(real_clip("carphone_pristine.mp4"))
    decision = decide(item, wanted, CAPS)[0]
    assert decision.source_fps == pytest.approx(29.97, abs=0.001)
    assert (decision.source_frames, decision.frames_retimed, decision.frames_kept) == (120, 64, 61)
    assert "pixels of 1.094:1 made square" in decision.notes
    assert pixels_of(item, wanted).shape == (3, 61, 144, 192)


def test_a_header_that_counts_one_more_is_a_note(tmp_path: Path) -> None:
    path = with_header_count(write_clip(tmp_path / "b.avi", 150, rate=30), 151)
    decision = decided(path, rules((77, 81)))
    assert (decision.source_frames, decision.frames_retimed, decision.frames_kept) == (150, 80, 81)
    assert "header counts 151 pictures, 150 are there" in decision.notes
    wrong = decided(with_header_count(path, 200), rules((77, 81)))
    assert wrong.reason == "truncated: its header counts 200 pictures, 150 are there"
    assert wrong.kind == "unreadable"


@pytest.mark.parametrize("num_frames", [1, 2, 6])
def test_pictures_that_a_decoder_holds_back_count(tmp_path: Path, num_frames: int) -> None:
    """H.264 gives its first picture only after some more, or at the end."""
    path = write_clip(tmp_path / "a.mp4", num_frames, codec="libx264")
    decision = decided(path, rules((5,), repeat_last=4))
    assert (decision.source_frames, decision.frames_retimed) == (num_frames, num_frames)
    assert pixels_of(item_of(path), rules((5,), repeat_last=4)).shape == (3, 5, 64, 64)


def test_slow_files_repeat_pictures_and_say_so(tmp_path: Path) -> None:
    decision = decided(write_clip(tmp_path / "a.mp4", 9, rate=8), rules((17,)))
    assert (decision.source_frames, decision.frames_kept) == (9, 17)
    assert "pictures repeated to reach the frame rate" in decision.notes


def test_clips_too_short_after_retiming_say_both_rates(tmp_path: Path) -> None:
    decision = decided(write_clip(tmp_path / "a.mp4", 24, rate=24), rules((1, 33)))
    assert decision.reason == (
        "shorter than 33 frames, the least of r (16 at 16 fps)"
        " (the file: 24 frames at 24 fps; re-timed to 16 fps: 16)"
    )
    assert decision.kind == "unfit"


# ---- grey, portrait, alpha ----


def test_grey_and_alpha_become_rgb(tmp_path: Path) -> None:
    grey = write_image(tmp_path / "grey.png", mode="L")
    decision = decided(grey, rules((1,)))
    assert decision.notes == "L made RGB"
    pixels = pixels_of(item_of(grey), rules((1,)))
    assert torch.equal(pixels[0], pixels[1])
    clear = tmp_path / "clear.png"
    Image.new("RGBA", (64, 64), (9, 9, 9, 0)).save(clear)
    assert pixels_of(item_of(clear), rules((1,))).unique().tolist() == [255]  # on white


def test_portrait_by_shape_and_by_tag(tmp_path: Path) -> None:
    wanted = rules((1, 5), (64, 128), max_crop=0.0)
    tall = write_clip(tmp_path / "tall.mp4", 8, size=(128, 64))
    assert decided(tall, wanted).bucket == "video-5x128x64"
    lying = write_clip(tmp_path / "lying.mp4", 8, size=(64, 128))
    assert decided(lying, wanted).bucket == "video-5x64x128"
    turned = turned_clockwise(lying)
    decision = decided(turned, wanted)
    assert decision.bucket == "video-5x128x64"
    assert decision.notes == "upright by its rotation tag"
    pixels = pixels_of(item_of(turned), wanted).float()  # red was on the left: now it is on top
    assert pixels[0, :, 10:50].mean() > 200
    assert pixels[0, :, 80:].mean() < 80
    upright = tmp_path / "a.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (128, 64)).save(upright, exif=exif)
    assert decided(upright, wanted).bucket == "image-128x64"


# ---- what cannot be used ----


def test_damaged_and_disguised_media_are_named(tmp_path: Path) -> None:
    clip = write_clip(tmp_path / "clip.mp4", 40)
    web = fast_start(clip, tmp_path / "web.mp4")
    picture = write_image(tmp_path / "picture.png")
    cases = {
        "empty.mp4": (b"", r"the file is empty \(0 bytes\)"),
        "cut.mp4": (clip.read_bytes()[:-500], "cannot be decoded"),
        "cutweb.mp4": (web.read_bytes()[: len(web.read_bytes()) * 2 // 3], "truncated: its header counts 40"),
        "text.mp4": (b"hello " * 100, "first bytes are those of no known image or video"),
        "disguised.mp4": (picture.read_bytes(), r"named as a video \(\.mp4\), it is an image \(PNG\)"),
        "disguised.png": (clip.read_bytes(), r"named as an image \(\.png\), it is a video \(mov\)"),
        "cut.png": (picture.read_bytes()[:-2000], "cannot be read"),
        "playlist.mp4": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n" * 20, "no known image or video"),
    }
    for name, (data, _) in cases.items():
        (tmp_path / name).write_bytes(data)
    with Decoder(2, rules((1, 5)), CAPS, pixels=True) as decoder:
        done = {d.item.name: d.decision for d in decoder.run([item_of(tmp_path / name) for name in cases])}
    for name, (_, says) in cases.items():
        assert done[name].kind == "unreadable", name
        assert re.search(says, done[name].reason), f"{name}: {done[name].reason}"


def test_animated_pictures_are_named(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (64, 64), (i * 40, 0, 0)) for i in range(6)]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], duration=100)
    assert decided(tmp_path / "a.webp", rules((1, 5))).reason == "an animated picture: convert it to a video"
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=100)
    decision = decided(tmp_path / "a.gif", rules((1, 5)))
    assert (decision.bucket, decision.source_frames) == ("video-5x64x64", 6)


@pytest.mark.parametrize(
    ("caps", "says"),
    [
        (Caps(max_pixels=1000), r"64x64 pixels, the limit is 1000"),
        (Caps(max_frames=39), "more than 39 pictures"),
        (Caps(max_bytes=100), r"\d+ bytes, the limit is 100"),
    ],
)
def test_caps(tmp_path: Path, caps: Caps, says: str) -> None:
    decision = decided(write_clip(tmp_path / "a.mp4", 40), rules((1, 5)), caps)
    assert decision.kind == "unreadable"
    assert re.search(says, decision.reason), decision.reason


def test_an_image_above_the_cap_is_never_decoded(tmp_path: Path) -> None:
    Image.new("1", (9000, 9000)).save(tmp_path / "large.png")  # 10 kB on disk, 243 MB as RGB
    assert decided(tmp_path / "large.png", rules((1,))).reason == "9000x9000 pixels, the limit is 64000000"
    Image.new("1", (20000, 20000)).save(tmp_path / "bomb.png")
    assert "decompression bomb" in decided(tmp_path / "bomb.png", rules((1,))).reason


def test_caps_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="limits"):
        Caps(max_seconds=0.0)
