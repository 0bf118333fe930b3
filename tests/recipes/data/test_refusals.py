"""What encoding and training refuse: other VAEs, bad media, disks that are full or closed."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.recipes.data.files import (
    captioned,
    make_tiny_vae,
    write_clip,
    write_image,
)
from tests.recipes.data.stores import Command, contents, count_encodes
from zellige_lightning.errors import DataError
from zellige_lightning.recipes.latents import LatentDataModule
from zellige_lightning.recipes.wan21.encode_cli import main


def test_samples_of_another_vae_are_refused(
    tmp_path: Path, images: Path, encode: Command, tiny_buckets: Path
) -> None:
    encode(images)
    before = sorted(path.name for path in (tmp_path / "out").rglob("*"))
    other = make_tiny_vae(tmp_path / "other", seed=1)
    with pytest.raises(SystemExit, match=r"DataError: 'out' holds samples of other settings \(vae_weights"):
        encode(images, "--vae", str(other))
    with pytest.raises(SystemExit, match="other settings .*text_len: 16 there, 20 now"):
        encode(images, "--text-len", "20")
    with pytest.raises(SystemExit, match="other settings .*buckets"):
        encode(images, "--buckets", "small")
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == before
    encode(images, "--vae", str(other), out="second")
    data = LatentDataModule(str(tmp_path / "out"), str(tmp_path / "second"))
    with pytest.raises(DataError, match="held_out samples were encoded by another VAE"):
        data.setup()


def test_training_does_not_go_on_with_another_vae(tmp_path: Path, images: Path, encode: Command) -> None:
    encode(images)
    encode(images, "--vae", str(make_tiny_vae(tmp_path / "other", seed=1)), out="second")
    first = LatentDataModule(str(tmp_path / "out"))
    first.setup()
    state = json.loads(json.dumps(first.state_dict()))
    same, other = LatentDataModule(str(tmp_path / "out")), LatentDataModule(str(tmp_path / "second"))
    same.setup()
    same.load_state_dict(state)
    other.setup()
    with pytest.raises(DataError, match="samples of this run were encoded by another VAE.*vae_weights"):
        other.load_state_dict(state)
    late = LatentDataModule(str(tmp_path / "second"))
    late.load_state_dict(state)
    with pytest.raises(DataError, match="another VAE"):
        late.setup()


def test_unreadable_media_stop_at_the_limit_and_lose_nothing(
    tmp_path: Path, images: Path, encode: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = write_clip(tmp_path / "whole.mp4", 40)
    (images / "y.mp4").write_bytes(clip.read_bytes()[:-500])
    (images / "z.mp4").write_bytes(b"")
    shutil.copy(images / "0.png", images / "x.mp4")
    for name in "xyz":
        captioned(images / f"{name}.mp4")
    with pytest.raises(
        SystemExit, match=r"1 of 12 media cannot be read.*\n +x\.mp4: named as a video"
    ) as stopped:
        encode(images)
    assert "--max-unreadable" in str(stopped.value)
    calls = count_encodes(monkeypatch)
    encode(images, "--max-unreadable", "0.5")
    assert len(calls) == 0  # the images were done before the first unreadable one
    assert len(contents(tmp_path / "out")) == 9
    with (tmp_path / "out" / "decisions.csv").open(newline="") as file:
        reasons = {row["name"]: row["reason"] for row in csv.DictReader(file) if row["reason"]}
    assert reasons == {
        "x.mp4": "named as a video (.mp4), it is an image (PNG)",
        "y.mp4": "cannot be decoded: End of file",
        "z.mp4": "the file is empty (0 bytes)",
    }
    shutil.copy(clip, images / "y.mp4")  # repaired: only this is encoded, by the next run
    encode(images, "--max-unreadable", "0.5")
    assert len(calls) == 1
    assert len(contents(tmp_path / "out")) == 10


def test_no_usable_sample_is_an_error_with_reasons(tmp_path: Path, encode: Command) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    captioned(write_image(folder / "a.png", (16, 16)))
    with pytest.raises(SystemExit, match=r"none of 1 media could be used"):
        encode(folder)
    assert "fewer pixels than 0.8 of 64p (16x16)" in (tmp_path / "out" / "decisions.csv").read_text()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(
    tmp_path: Path, images: Path, encode: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_encodes(monkeypatch)
    (tmp_path / "out").write_text("a file stands here")
    with pytest.raises(SystemExit, match=r"DataError: '\.writable' cannot be written in 'out'"):
        encode(images)
    (tmp_path / "out").unlink()
    replace = os.replace
    refused = OSError(30, "Read-only file system")

    def read_only(source: str, target: str) -> None:
        if "/out/" in str(target):
            raise refused
        replace(source, target)

    monkeypatch.setattr(os, "replace", read_only)
    with pytest.raises(SystemExit, match="Read-only file system"):
        encode(images)
    assert calls == []


def test_a_full_disk_keeps_what_was_encoded(
    tmp_path: Path, images: Path, tiny_buckets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses to write past a limit, in the middle of packing a shard."""
    code = (
        "import resource, signal, sys\n"
        "from zellige_lightning.recipes.wan21.encode_cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"  # a part has 5 kB, nine have 45
        "main(sys.argv[1:])\n"
    )
    command = [
        str(images),
        "--output",
        str(tmp_path / "out"),
        "--buckets",
        str(tiny_buckets),
        "--workers",
        "1",
    ]
    run = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert run.returncode == 1
    assert "DataError: 'shard-" in run.stderr
    assert "cannot be written" in run.stderr
    assert "what was written before is kept" in run.stderr
    calls = count_encodes(monkeypatch)
    main(command)
    assert calls == []
    assert len(contents(tmp_path / "out")) == 9
