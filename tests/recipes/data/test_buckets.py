"""The choice of a shape, pinned in tables, and the rules at their borders."""

from __future__ import annotations

import pytest

from tests.recipes.data.files import rules
from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.buckets import Unfit, load_rules, rules_from
from zellige_lightning.recipes.wan21.patchify import token_grid

WAN = load_rules("wan21")
# (height, width, frames at 16 fps or 0 for an image) -> bucket. A change here moves users' samples.
GOLDEN = {
    (256, 256, 0): "image-256x256",
    (300, 451, 0): "image-224x304",
    (512, 512, 0): "image-256x256",
    (600, 512, 0): "image-304x224",
    (427, 640, 0): "image-224x304",
    (640, 640, 0): "image-640x640",
    (872, 1000, 0): "image-960x960",
    (1411, 1411, 0): "image-1440x1440",
    (720, 1280, 0): "image-720x1280",
    (1280, 720, 0): "image-1280x720",
    (1080, 1920, 0): "image-1088x1920",
    (1920, 1080, 0): "image-1920x1088",
    (2160, 3840, 0): "image-1088x1920",
    (480, 832, 81): "video-81x480x832",
    (480, 854, 160): "video-161x480x832",
    (832, 480, 241): "video-241x832x480",
    (272, 640, 160): "video-81x192x352",
    (720, 1280, 84): "video-81x720x1280",
    (1080, 1920, 161): "video-161x1088x1920",
    (1080, 1920, 84): "video-81x720x1280",  # too short for 1080p, whose first video has 161 frames
    (480, 832, 40): "video-33x192x352",
    (576, 720, 144): "video-81x560x736",
}


@pytest.mark.parametrize("medium", GOLDEN)
def test_golden_assignments(medium: tuple[int, int, int]) -> None:
    height, width, frames = medium
    shape = WAN.choose(height, width, frames or 1, is_video=frames > 0)
    assert shape.bucket.name == GOLDEN[medium]
    assert shape.bucket.grid == token_grid(shape.frames, shape.height, shape.width)


def test_the_papers_shapes_are_in_the_catalog() -> None:
    grids = {shape.bucket.grid for shape in WAN.shapes()}
    assert {(1, 16, 16), (1, 30, 52), (1, 45, 80), (1, 68, 120), (41, 30, 52), (61, 68, 120)} <= grids
    for shape in WAN.shapes():
        assert shape.height % 16 == shape.width % 16 == 0
        assert shape.frames % 4 == 1
        (resolution,) = [r for r in WAN.resolutions if r.name == shape.resolution]
        assert 1.0 <= shape.height * shape.width / resolution.area <= 1.18  # sides are rounded up


@pytest.mark.parametrize(("area", "opens"), [(0.79, False), (0.81, True)])
def test_a_resolution_opens_at_its_share_of_pixels(area: float, opens: bool) -> None:
    side = (area * 256 * 256) ** 0.5
    height = width = int(side) + 1 if opens else int(side)
    if opens:
        assert WAN.choose(height, width, 1, is_video=False).resolution == "256p"
    else:
        with pytest.raises(Unfit, match=r"fewer pixels than 0\.8 of 256p \(227x227\)"):
            WAN.choose(height, width, 1, is_video=False)


@pytest.mark.parametrize(
    ("frames", "kept"), [(17, 17), (16, 17), (15, 13), (144, 145), (143, 141), (5, 5), (4, 5)]
)
def test_any_4n_plus_1_of_a_range(frames: int, kept: int) -> None:
    ranged = rules_from(
        {"resolutions": {"a": {"size": [64, 64], "frames": ["5..241"]}}, "aspect_ratios": ["1:1"]}
    )
    assert ranged.choose(64, 64, frames, is_video=True).frames == kept


def test_without_repeating_a_clip_of_160_frames_has_81() -> None:
    assert rules((81, 161), repeat_last=1).choose(64, 64, 160, is_video=True).frames == 161
    assert rules((81, 161), repeat_last=0).choose(64, 64, 160, is_video=True).frames == 81


def test_videos_never_become_images_nor_images_videos() -> None:
    with pytest.raises(Unfit, match=r"shorter than 9 frames, the least of r \(3 at 16 fps\)"):
        rules((1, 9)).choose(64, 64, 3, is_video=True)
    with pytest.raises(Unfit, match="r take no videos"):
        rules((1,)).choose(64, 64, 90, is_video=True)
    with pytest.raises(Unfit, match="r take no images"):
        rules((9,)).choose(64, 64, 1, is_video=False)


def test_too_much_cut_off_is_no_fit() -> None:
    with pytest.raises(Unfit, match=r"more than 40% would be cut off \(75% of 64x256 for 64x64\)"):
        rules((1,)).choose(64, 256, 1, is_video=False)
    assert rules((1,), max_crop=0.8).choose(64, 256, 1, is_video=False).width == 64


def test_resolutions_can_be_chosen() -> None:
    few = WAN.only(["256p", "480p"])
    assert few.choose(1080, 1920, 1, is_video=False).bucket.name == "image-480x832"
    with pytest.raises(ConfigError, match=r"'4k'[\s\S]*256p, 480p"):
        WAN.only(["4k"])


def test_settings_tell_rules_apart() -> None:
    assert WAN.settings == load_rules("wan21").settings
    assert WAN.settings != WAN.only(["256p"]).settings
    assert rules((1,)).settings != rules((1,), max_crop=0.1).settings


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"resolutions": {}, "aspect_ratios": ["1:1"]}, "no resolution"),
        (
            {"resolutions": {"a": {"size": [64, 64], "frames": [6]}}, "aspect_ratios": ["1:1"]},
            "6 frames, not 4n",
        ),
        ({"resolutions": {"a": {"size": [64, 64], "frames": [1]}}, "aspect_ratios": ["0:1"]}, "not positive"),
        (
            {
                "resolutions": {"a": {"size": [64, 64], "frames": [1]}},
                "aspect_ratios": ["1:1"],
                "max_crop": 1.0,
            },
            "max_crop=1.0",
        ),
    ],
)
def test_rules_that_make_no_sense(entries: dict[str, object], says: str) -> None:
    with pytest.raises((ConfigError, DataError), match=says):
        rules_from(entries)


def test_buckets_that_are_not_there_name_those_that_are(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"'wan22'[\s\S]*small, wan21"):
        load_rules("wan22")
    (tmp_path / "a.yaml").write_text("resolutions: {a: 3}\naspect_ratios: ['1:1']")
    with pytest.raises(ConfigError, match="not understood"):
        load_rules(str(tmp_path / "a.yaml"))
