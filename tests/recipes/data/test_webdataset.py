"""Tars as streams: samples by stem, members that are refused, and bytes read from where they lie."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tests.recipes.data.files import write_tar
from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.folders import collect
from zellige_lightning.recipes.wan21.manifest import content_digest

LONG = "folder/" * 30 + "name"


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_samples_of_a_tar(tmp_path: Path, form: int) -> None:
    long = LONG if form != tarfile.USTAR_FORMAT else "folder/name"
    members = {
        "000.mp4": b"first clip",
        "000.txt": b"one",
        "000.json": b'{"caption": "not this"}',
        f"{long}.jpg": b"picture" * 1000,
        f"{long}.json": b'{"text": "two", "width": 3}',
        "002.webp": b"x",
        "003.cls": b"7",
        "004.txt": b"alone",
    }
    listing = collect([write_tar(tmp_path / "shard-0.tar", members, format=form)])
    items = {item.key: item for item in listing.items}
    assert {key: item.caption for key, item in items.items()} == {
        "shard-0/000.mp4": "one",
        f"shard-0/{long}.jpg": "two",
    }
    with items[f"shard-0/{long}.jpg"].open() as file:
        assert file.read(7) == b"picture"
        assert file.seek(-7, io.SEEK_END) == 6993
        assert file.read() == b"picture"
        assert file.read(10) == b""
    assert {skip.name: skip.reason for skip in listing.skipped} == {
        "shard-0/002.webp": "no caption (expected 002.txt or .json in the tar)",
        "shard-0/003.cls": "no medium by its suffix",
        "shard-0/004.txt": "no medium of that name",
    }
    digests = {content_digest(item) for item in items.values()}
    assert len(digests) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shard-0.tar"]  # nothing was extracted


def test_tars_in_a_folder_have_keys_of_their_own(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tar(tmp_path / f"{name}.tar", {"0.mp4": b"x", "0.txt": name.encode()})
    assert [item.key for item in collect([tmp_path]).items] == ["a/0.mp4", "b/0.mp4"]


def hostile(path: Path, name: str, kind: bytes = tarfile.REGTYPE) -> Path:
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("0.mp4")
        info.size = 1
        tar.addfile(info, io.BytesIO(b"x"))
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    return path


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("/etc/a.txt", tarfile.REGTYPE, "an absolute path"),
        ("a/../../b.txt", tarfile.REGTYPE, "leaves the folder"),
        ("0.txt", tarfile.SYMTYPE, "a link, device"),
        ("0.txt", tarfile.LNKTYPE, "a link, device"),
        ("0.txt", tarfile.CHRTYPE, "a link, device"),
        ("0.txt", tarfile.FIFOTYPE, "a link, device"),
    ],
)
def test_unsafe_members_make_the_tar_unusable(tmp_path: Path, name: str, kind: bytes, says: str) -> None:
    with pytest.raises(DataError, match=f"'bad.tar' has the member .*{says}"):
        collect([hostile(tmp_path / "bad.tar", name, kind)])
    assert [path.name for path in tmp_path.iterdir()] == ["bad.tar"]


def test_two_media_of_one_sample_are_an_error(tmp_path: Path) -> None:
    for names in (("0.mp4", "0.jpg"), ("0.mp4", "0.mp4")):
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for name in names:
                tar.addfile(tarfile.TarInfo(name))
        with pytest.raises(DataError, match="one sample has one medium"):
            collect([tmp_path / "a.tar"])


def test_damaged_and_compressed_tars(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"0.mp4": b"x" * 5000, "0.txt": b"c"})
    data = tar.read_bytes()
    tar.write_bytes(data[:3000])
    with pytest.raises(DataError, match="cut short at '0.mp4'"):
        collect([tar])
    tar.write_bytes(b"\x1f\x8b" + data)
    with pytest.raises(DataError, match="no intact tar"):
        collect([tar])
    tar.write_bytes(data[:10] + b"!" + data[11:])
    with pytest.raises(DataError, match="no intact tar"):
        collect([tar])


def test_claims_are_checked_before_memory_is_taken(tmp_path: Path) -> None:
    """A header of 512 bytes that claims 8 EiB of name."""
    info = tarfile.TarInfo("././@LongLink")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 1 << 60
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT))
    with pytest.raises(DataError, match="cut short"):
        collect([tmp_path / "a.tar"])
    info.size = 1 << 20
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + b"a" * (1 << 20))
    with pytest.raises(DataError, match="a name of 1048576 bytes"):
        collect([tmp_path / "a.tar"])
