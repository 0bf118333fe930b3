"""Encoding goes on after any kill, and several ranks share it."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.recipes.data.files import (
    captioned,
    real_clip,
    write_image,
)
from tests.recipes.data.stores import Command, contents, count_encodes, start, wait_for_parts
from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.encode_cli import main
from zellige_lightning.recipes.wan21.encoded_row import read_rows
from zellige_lightning.recipes.wan21.encoded_store import EncodedStore, open_store

# ---- restart ----


def test_kill_and_rerun_encodes_only_the_rest(
    tmp_path: Path,
    images: Path,
    encode: Command,
    tiny_vae: Path,
    tiny_buckets: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = start(images, tmp_path / "out", tiny_buckets, "--vae", str(tiny_vae))
    wait_for_parts(process, tmp_path / "out", 3)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    parts = tmp_path / "out" / "parts"
    torn = [parts / ".a.safetensors.123", tmp_path / "out" / ".shard-b.safetensors.123"]
    for path in torn:  # what kills within a write leave
        path.write_bytes(b"half")
        os.utime(path, (0, 0))
    finished = [row for part in parts.glob("*.safetensors") for row in read_rows(part)]
    if (tmp_path / "out" / "manifest.parquet").exists():
        pytest.fail("it was over before it was killed")
    with pytest.raises(DataError, match=r"no index\.json or manifest\.parquet[\s\S]*zellige-encode again"):
        open_store(tmp_path / "out")
    calls = count_encodes(monkeypatch)
    encode(images)
    assert len(calls) == 9 - len(finished)
    assert not any(path.exists() for path in torn)
    encode(images, out="unbroken")
    assert contents(tmp_path / "out") == contents(tmp_path / "unbroken")
    assert len(calls) == 9 - len(finished) + 9
    encode(images)  # complete: nothing to do
    assert len(calls) == 18 - len(finished)


def test_a_kill_between_shard_and_clean_up_leaves_nothing_double(
    tmp_path: Path, images: Path, encode: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:  # the shard is written, its parts are still there
        patched.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        encode(images)
    assert len(list((tmp_path / "out" / "parts").glob("*.safetensors"))) == 9
    before = contents(tmp_path / "out")
    calls = count_encodes(monkeypatch)
    encode(images)
    assert calls == []
    assert contents(tmp_path / "out") == before
    assert list((tmp_path / "out" / "parts").glob("*.safetensors")) == []


def test_a_damaged_shard_is_encoded_again(
    tmp_path: Path, images: Path, encode: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(images)
    before = contents(tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(DataError, match="bytes instead of"):
        EncodedStore(tmp_path / "out")
    calls = count_encodes(monkeypatch)
    encode(images)
    assert len(calls) == 9
    assert contents(tmp_path / "out") == before


def test_what_changed_is_encoded_again_and_nothing_else(
    tmp_path: Path, images: Path, encode: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(images)
    before = contents(tmp_path / "out")
    calls = count_encodes(monkeypatch)
    captioned(images / "1.png", "another caption")
    write_image(images / "2.png", seed=99)
    os.utime(images / "3.png")  # same bytes, another time
    (images / "4.png").unlink()
    captioned(write_image(images / "new.png", seed=7))
    encode(images, "--max-unreadable", "1")
    after = contents(tmp_path / "out")
    assert len(calls) == 3
    assert set(after) == set(before) - {"4.png"} | {"new.png"}
    assert after["1.png"][1:3] == ("another caption", before["1.png"][2])
    assert after["2.png"][2] != before["2.png"][2]
    assert all(after[f"{i}.png"] == before[f"{i}.png"] for i in (0, 3, 5, 6, 7, 8))


@pytest.mark.slow
def test_an_interrupt_ends_soon_and_can_be_continued(tmp_path: Path, tiny_buckets: Path) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    for i in range(8):
        shutil.copy(real_clip("bigbuckbunny.mp4"), folder / f"{i}.mp4")
        captioned(folder / f"{i}.mp4")
    process = start(folder, tmp_path / "out", tiny_buckets)
    wait_for_parts(process, tmp_path / "out", 1)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, _ = process.communicate(timeout=30)
    assert time.monotonic() - began < 5.0
    assert process.returncode == 1
    assert out.endswith("stopped; the same command goes on with what is missing\n")
    main([str(folder), "--output", str(tmp_path / "out"), "--buckets", str(tiny_buckets), "--quiet"])
    assert len(contents(tmp_path / "out")) == 8


# ---- ranks ----


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_three_ranks_and_one_give_the_same_store(
    tmp_path: Path,
    images: Path,
    encode: Command,
    order: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    encode(images, out="one")
    calls = count_encodes(monkeypatch)
    capsys.readouterr()
    for position, rank in enumerate(order):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        encode(images)
        out = capsys.readouterr().out
        assert f"rank {rank} of 3: 3 media, 3 of them to encode" in out
        last = position == 2
        assert ("this share is done" in out) is not last
        assert (tmp_path / "out" / "manifest.parquet").exists() is last
    assert len(calls) == 9
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    assert len(list((tmp_path / "out").glob("shard-*"))) == 3


def test_a_run_of_another_number_of_ranks_goes_on(
    tmp_path: Path, images: Path, encode: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(images, "--rank", "1", "--world-size", "4")
    calls = count_encodes(monkeypatch)
    encode(images)
    assert len(calls) == 9 - 2
    assert len(contents(tmp_path / "out")) == 9


@pytest.mark.slow
def test_ranks_at_the_same_time(tmp_path: Path, images: Path, tiny_buckets: Path) -> None:
    shares = [("--rank", str(rank), "--world-size", "2") for rank in range(2)]
    processes = [start(images, tmp_path / "out", tiny_buckets, *share) for share in shares]
    logs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], logs
    assert len(contents(tmp_path / "out")) == 9
