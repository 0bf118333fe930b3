"""What sources list: folders, tables of every kind, and nothing dropped without a word."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.recipes.data.files import captioned
from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.folders import collect
from zellige_lightning.recipes.wan21.manifest import Listing
from zellige_lightning.recipes.wan21.tables import PRESETS, preset

Rows = list[dict[str, object]]


def touch(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"medium")
    return path


def write_table(path: Path, rows: Rows) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


def found(listing: Listing) -> dict[str, str]:
    return {item.key: item.caption for item in listing.items}


def reasons(listing: Listing) -> dict[str, str]:
    return {skip.name: skip.reason for skip in listing.skipped}


# ---- folders ----


def test_folders_with_captions_beside_media(tmp_path: Path) -> None:
    captioned(touch(tmp_path / "a.mp4"), "  a clip\n of two lines ")
    touch(tmp_path / "deep" / "b.PNG").with_suffix(".json").write_text('{"caption": "a picture"}')
    touch(tmp_path / "c.jpg")
    touch(tmp_path / "d.heic")
    captioned(tmp_path / "e.mp4")
    touch(tmp_path / ".hidden" / "f.mp4")
    listing = collect([tmp_path])
    assert found(listing) == {"a.mp4": "a clip of two lines", "deep/b.PNG": "a picture"}
    assert reasons(listing) == {
        "c.jpg": "no caption (expected c.txt or .json)",
        "d.heic": "no medium by its suffix",
        "e.txt": "no medium of that name",
    }
    assert found(collect([tmp_path], missing_caption="empty"))["c.jpg"] == ""


def test_folders_without_samples_say_what_there_was(tmp_path: Path) -> None:
    touch(tmp_path / "a.psd")
    touch(tmp_path / "b.mp4")
    with pytest.raises(
        DataError, match=r"no image or video with a caption.*2 entries.*no caption.*no medium by"
    ):
        collect([tmp_path])


# ---- tables ----

ROWS: dict[str, Rows] = {
    "openvid": [
        {
            "video": "v 1.mp4",
            "caption": 'a, "quoted" caption',
            "aesthetic score": 5.1,
            "motion score": "",
            "temporal consistency score": 0.9,
            "camera motion": "static",
            "frame": 120,
            "fps": 24.0,
            "seconds": 5.0,
        }
    ],
    "diffsynth": [{"video": "v 1.mp4", "prompt": 'a, "quoted" caption'}],
    "opensora": [
        {
            "path": "v 1.mp4",
            "text": 'a, "quoted" caption',
            "num_frames": 120,
            "height": 9,
            "width": 16,
            "aspect_ratio": 0.56,
            "resolution": 144,
            "fps": 24,
        }
    ],
    "videox": [
        {"file_path": "v 1.mp4", "text": 'a, "quoted" caption', "type": "video", "width": 9, "height": 16}
    ],
}


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".parquet"])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("named", [True, False])
def test_presets_in_every_format(tmp_path: Path, name: str, suffix: str, named: bool) -> None:
    touch(tmp_path / "v 1.mp4")
    table = write_table(tmp_path / f"table{suffix}", ROWS[name])
    listing = collect([table], columns=preset(name) if named else None)
    assert found(listing) == {"v 1.mp4": 'a, "quoted" caption'}
    assert listing.items[0].path == str(tmp_path / "v 1.mp4")


def test_diffsynth_rows_may_name_images(tmp_path: Path) -> None:
    touch(tmp_path / "a.png")
    touch(tmp_path / "b.mp4")
    rows: Rows = [
        {"video": "", "image": "a.png", "prompt": "picture"},
        {"video": "b.mp4", "image": "", "prompt": "clip"},
        {"video": "", "image": "", "prompt": "nothing"},
    ]
    listing = collect([write_table(tmp_path / "metadata.csv", rows)])
    assert found(listing) == {"a.png": "picture", "b.mp4": "clip"}
    assert reasons(listing) == {"metadata.csv, row 3": "no name of a file in the row"}


def test_openvid_files_are_found_in_any_folder(tmp_path: Path) -> None:
    touch(tmp_path / "media" / "part_7" / "a.mp4")
    for part in ("part_1", "part_2"):
        touch(tmp_path / "media" / part / "twice.mp4")
    rows: Rows = [{"video": name, "caption": "c"} for name in ("a.mp4", "twice.mp4", "gone.mp4")]
    table = write_table(tmp_path / "OpenVid-1M.csv", rows)
    listing = collect([table], columns=PRESETS["openvid"], media_root=tmp_path / "media")
    assert found(listing) == {"a.mp4": "c"}
    assert reasons(listing) == {
        "twice.mp4": "2 files below the media root have this name",
        "gone.mp4": "the file does not exist below the media root",
    }
    # Part of a large data set may be there: what is not is counted apart from what cannot be read.
    assert {skip.name: skip.kind for skip in listing.skipped} == {
        "twice.mp4": "unlisted",
        "gone.mp4": "missing",
    }


def test_koala_cuts_clips_out_of_whole_videos(tmp_path: Path) -> None:
    touch(tmp_path / "abc_0.mp4")
    touch(tmp_path / "xyz.mkv")
    address = "https://www.youtube.com/watch?v="
    rows: Rows = [
        {
            "videoID": "abc_0",
            "url": f"{address}abc",
            "timestamp": "['0:00:01.0', '0:00:02.0']",
            "caption": "cut",
        },
        {
            "videoID": "xyz_3",
            "url": f"{address}xyz&t=3",
            "timestamp": "['1:02:03.500', '1:02:13.5']",
            "caption": "part",
        },
        {
            "videoID": "xyz_4",
            "url": f"{address}xyz",
            "timestamp": "['0:00:09', '0:00:03']",
            "caption": "backwards",
        },
    ]
    listing = collect([write_table(tmp_path / "Koala_36M_1.csv", rows)], columns=PRESETS["koala36m"])
    whole, part = listing.items
    assert (whole.key, whole.start_s, whole.end_s) == ("abc_0", 0.0, None)
    assert (part.key, part.start_s, part.end_s) == ("xyz_3@3723.500-3733.500", 3723.5, 3733.5)
    assert part.path.endswith("xyz.mkv")
    assert "no start and end" in reasons(listing)["xyz_4"]


def test_columns_of_ones_own(tmp_path: Path) -> None:
    from zellige_lightning.recipes.wan21.tables import Columns

    touch(tmp_path / "a.mp4")
    table = write_table(tmp_path / "own.csv", [{"file": "a.mp4", "words": "hello"}])
    assert found(collect([table], columns=Columns(("file",), "words"))) == {"a.mp4": "hello"}


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_wrong_columns_are_answered_with_those_found(tmp_path: Path, suffix: str) -> None:
    table = write_table(tmp_path / f"t{suffix}", [{"clip": "a.mp4", "label": "x"}])
    with pytest.raises(DataError, match="has no column 'video', 'caption'; it has 'clip', 'label'"):
        collect([table], columns=PRESETS["openvid"])
    with pytest.raises(DataError, match=r"has no column 'video or image', 'prompt'"):
        collect([table], columns=PRESETS["diffsynth"])
    with pytest.raises(DataError, match="fits no preset of columns; it has 'clip', 'label'"):
        collect([table])
    with pytest.raises(ConfigError, match=r"'panda'[\s\S]*openvid, koala36m, diffsynth, opensora, videox"):
        preset("panda")


def test_addresses_doubles_and_empty_captions_are_named(tmp_path: Path) -> None:
    touch(tmp_path / "a.mp4")
    rows: Rows = [
        {"path": "a.mp4", "text": "one"},
        {"path": "a.mp4", "text": "two"},
        {"path": "https://host/b.mp4", "text": "c"},
        {"path": "a.mp4", "text": " "},
    ]
    listing = collect([write_table(tmp_path / "t.csv", rows)])
    assert found(listing) == {"a.mp4": "one"}
    assert [skip.reason for skip in listing.skipped] == [
        "an address, not a file: download it first",
        "no caption (column 'text' of t.csv, row 4 is empty)",
        "listed twice as 'a.mp4'",
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", "{"), ("a.json", '{"video": 1}'), ("a.jsonl", "[1]\n"), ("a.parquet", "no parquet")],
)
def test_damaged_tables_are_named(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=f"table '{name}' cannot be read"):
        collect([tmp_path / name])


def test_sources_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'gone' does not exist"):
        collect([tmp_path / "gone"])
    with pytest.raises(DataError, match=r"'a\.zip' is neither a folder nor a table nor a tar"):
        collect([touch(tmp_path / "a.zip")])
    with pytest.raises(ConfigError, match="missing caption"):
        collect([tmp_path], missing_caption="guess")


def test_a_caption_that_changes_asks_for_another_sample(tmp_path: Path) -> None:
    captioned(touch(tmp_path / "a.mp4"), "one")
    (before,) = collect([tmp_path]).items
    captioned(tmp_path / "a.mp4", "two")
    (after,) = collect([tmp_path]).items
    assert before.key == after.key
    assert before.request != after.request
