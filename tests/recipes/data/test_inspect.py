"""`zellige-inspect`: every file, a summary, and an exit code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.recipes.data.files import (
    write_clip,
    write_image,
)
from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.decision import (
    Decision,
    check_unreadable,
    summary,
    to_csv,
)
from zellige_lightning.recipes.wan21.inspect_cli import main


def test_the_command_prints_every_file_and_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.png", "b.png"):
        write_image(tmp_path / name).with_suffix(".txt").write_text("c")
    write_clip(tmp_path / "c.mp4", 20).with_suffix(".txt").write_text("c")
    write_image(tmp_path / "d.png")
    options = ["--buckets", "small", "--workers", "1", "--table", str(tmp_path / "out" / "t.csv")]
    main([str(tmp_path), *options])
    out = capsys.readouterr().out
    assert "a.png: image-64x64: 64x64" in out
    assert "c.mp4: video-17x64x64: 64x64, 20 frames at 16 fps -> 20 at 16 fps, 17 kept" in out
    assert "d.png: skipped: no caption (expected d.txt or .json)" in out
    assert "4 entries: 3 kept, 1 skipped" in out
    assert re.search(r"image-64x64 +2 +16 +32", out)
    assert re.search(r"video-17x64x64 +1 +80 +80", out)
    assert len((tmp_path / "out" / "t.csv").read_text().splitlines()) == 5


def test_the_command_fails_where_training_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = write_image(tmp_path / "a.png", (16, 16))
    small.with_suffix(".txt").write_text("c")
    with pytest.raises(SystemExit, match="no medium is kept"):
        main([str(tmp_path), "--buckets", "small", "--workers", "1"])
    assert "fewer pixels than 0.8 of 64p (16x16)" in capsys.readouterr().out
    (tmp_path / "b.mp4").write_bytes(b"")
    (tmp_path / "b.txt").write_text("c")
    with pytest.raises(SystemExit, match=r"1 of 2 media cannot be read[\s\S]*b\.mp4: the file is empty"):
        main([str(tmp_path), "--buckets", "small", "--workers", "1"])
    with pytest.raises(SystemExit, match=r"ConfigError: --media-column"):
        main([str(tmp_path), "--media-column", "x"])


def test_unreadable_media_above_the_limit_are_listed() -> None:
    bad = [Decision(f"{i}.mp4", reason="broken", kind="unreadable") for i in range(3)]
    check_unreadable([*bad, Decision("x", reason="small", kind="unfit")], 300, 0.01)
    with pytest.raises(DataError, match=r"3 of 299 .*1\.00%[\s\S]*2\.mp4: broken[\s\S]*--max-unreadable"):
        check_unreadable(bad, 299, 0.01)


def test_equal_reasons_are_counted_together() -> None:
    short = [Decision(str(i), reason=f"too short ({i} frames)", kind="unfit") for i in range(3)]
    assert "skipped      3  unfit: too short" in summary(short)
    assert to_csv(short).count("too short") == 3
