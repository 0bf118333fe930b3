"""Latent stores: exact slices, restart, and every kind of damage as a typed error."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from zellige_lightning.errors import DataError
from zellige_lightning.placement import Bucket, Sequence
from zellige_lightning.recipes.wan21.encode import Encoded, build_store
from zellige_lightning.recipes.wan21.store import INDEX, LatentStore
from zellige_lightning.sources import Sample, TokenSource

SETTINGS = {"codec": "test", "seed": 0}
SAMPLES = [Sample(f"clip/{i}", (1 + i % 3, 2, 3)) for i in range(10)]


def tokens_of(sample: Sample) -> int:
    return sample.grid[0] * sample.grid[1] * sample.grid[2]


def encode(sample: Sample) -> Encoded:
    number = float(sample.key.split("/")[1])
    rows = torch.arange(tokens_of(sample), dtype=torch.float16)[:, None]
    return Encoded((rows + 100 * number).expand(-1, 64), torch.full((4, 8), number), f"caption {sample.key}")


def sequence_of(sample: Sample) -> Sequence:
    return Sequence(0, sample.key, Bucket("b", sample.grid))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    build_store(tmp_path / "store", SETTINGS, SAMPLES, encode, samples_per_shard=4)
    return tmp_path / "store"


def test_slices_are_the_rows_that_were_written(folder: Path) -> None:
    store = LatentStore(folder, SETTINGS)
    assert isinstance(store, TokenSource)
    assert store.samples == tuple(SAMPLES)
    assert store.token_fields["latents"].shape == (64,)
    assert store.token_fields["latents"].dtype == torch.float16
    assert store.sequence_fields["text"].shape == (4, 8)
    for sample in SAMPLES:
        sequence, part = sequence_of(sample), range(2, tokens_of(sample) - 1)
        rows = store.read_tokens(sequence, part)["latents"]
        assert torch.equal(rows, encode(sample).latents[part.start : part.stop])
        assert torch.equal(store.read_sequence(sequence)["text"], encode(sample).text)
        assert store.caption(sample.key) == f"caption {sample.key}"
    assert store.read_tokens(sequence_of(SAMPLES[0]), range(3, 3))["latents"].shape == (0, 64)
    assert sorted(p.name for p in folder.iterdir()) == [
        ".lock",
        INDEX,
        *(f"shard-0000{i}.safetensors" for i in range(3)),
    ]


def test_a_complete_store_is_reused_and_an_interrupted_one_continued(tmp_path: Path) -> None:
    encoded: list[str] = []

    def fails_at(key: str | None) -> Callable[[Sample], Encoded]:
        def run(sample: Sample) -> Encoded:
            if sample.key == key:
                raise KeyboardInterrupt
            encoded.append(sample.key)
            return encode(sample)

        return run

    with pytest.raises(KeyboardInterrupt):
        build_store(tmp_path, SETTINGS, SAMPLES, fails_at("clip/6"), samples_per_shard=4)
    with pytest.raises(DataError, match="encode the data first"):
        LatentStore(tmp_path)
    encoded.clear()
    assert build_store(tmp_path, SETTINGS, SAMPLES, fails_at(None), samples_per_shard=4)
    assert encoded == [f"clip/{i}" for i in range(4, 10)]
    encoded.clear()
    assert not build_store(tmp_path, SETTINGS, SAMPLES, fails_at(None), samples_per_shard=4)
    assert encoded == []
    assert len(LatentStore(tmp_path, SETTINGS)) == 10


def test_shards_of_other_settings_are_not_continued(tmp_path: Path) -> None:
    build_store(tmp_path, SETTINGS, SAMPLES, encode, samples_per_shard=4)
    (tmp_path / INDEX).unlink()
    changed: list[str] = []

    def other(sample: Sample) -> Encoded:
        changed.append(sample.key)
        return encode(sample)

    build_store(tmp_path, {**SETTINGS, "seed": 1}, SAMPLES, other, samples_per_shard=4)
    assert len(changed) == 10


def test_two_builders_encode_once(tmp_path: Path) -> None:
    encoded: list[str] = []

    def slow(sample: Sample) -> Encoded:
        encoded.append(sample.key)
        time.sleep(0.01)
        return encode(sample)

    threads = [
        threading.Thread(target=build_store, args=(tmp_path, SETTINGS, SAMPLES, slow)) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(encoded) == 10
    LatentStore(tmp_path, SETTINGS).verify()


def test_it_travels_to_worker_processes(folder: Path) -> None:
    store = LatentStore(folder)
    store.read_sequence(sequence_of(SAMPLES[0]))
    copy = pickle.loads(pickle.dumps(store))
    assert torch.equal(copy.read_sequence(sequence_of(SAMPLES[5]))["text"], encode(SAMPLES[5]).text)
    assert list(DataLoader(store, batch_size=None, num_workers=1)) == SAMPLES


def damage_missing(folder: Path) -> None:
    (folder / "shard-00001.safetensors").unlink()


def damage_truncated(folder: Path) -> None:
    path = folder / "shard-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_header(folder: Path) -> None:
    for path in folder.glob("shard-*"):
        path.write_bytes(b"\xff" * 16 + path.read_bytes()[16:])


def damage_index(folder: Path) -> None:
    (folder / INDEX).write_text((folder / INDEX).read_text()[:-40])


def damage_format(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "format": 99}))


def damage_path(folder: Path) -> None:
    (folder / INDEX).write_text((folder / INDEX).read_text().replace('"shard-00001', '"../shard-00001'))


def damage_shards(folder: Path) -> None:
    (folder / INDEX).write_text('{"format": 1, "shards": []}')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_missing, "shard-00001.*is missing"),
        (damage_truncated, "shard-00001.*bytes instead of"),
        (damage_header, "shard-00000.*cannot be read"),
        (damage_index, "index of latent store 'store' is damaged"),
        (damage_format, "format 99"),
        (damage_path, "leaves the folder"),
        (damage_shards, "is damaged"),
    ],
)
def test_damage_is_named_on_opening(folder: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(folder)
    with pytest.raises(DataError, match=says):
        LatentStore(folder)


def test_a_changed_byte_is_found_by_verification_and_by_reuse(folder: Path) -> None:
    path = folder / "shard-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="shard-00002.*corrupt"):
        LatentStore(folder).verify()
    with pytest.raises(DataError, match="shard-00002.*corrupt"):
        build_store(folder, SETTINGS, SAMPLES, encode, samples_per_shard=4)


def test_foreign_settings_and_samples_are_named(folder: Path) -> None:
    with pytest.raises(DataError, match="seed: 0 stored, 1 wanted"):
        LatentStore(folder, {**SETTINGS, "seed": 1})
    with pytest.raises(DataError, match="other samples"):
        build_store(folder, SETTINGS, SAMPLES[:9], encode)
    store = LatentStore(folder)
    with pytest.raises(DataError, match="no sample 'clip/77'"):
        store.read_sequence(Sequence(0, "clip/77", Bucket("b", (1, 2, 3))))
    with pytest.raises(DataError, match="6 rows.*asks for 12"):
        store.read_tokens(Sequence(0, "clip/0", Bucket("b", (2, 2, 3))), range(12))


def test_encoders_are_held_to_grid_and_finite_values(tmp_path: Path) -> None:
    def short(sample: Sample) -> Encoded:
        return Encoded(torch.zeros(5, 64), torch.zeros(4, 8), "")

    def infinite(sample: Sample) -> Encoded:
        return Encoded(torch.full((tokens_of(sample), 64), float("nan")), torch.zeros(4, 8), "")

    with pytest.raises(DataError, match=r"encoded to \(5, 64\)"):
        build_store(tmp_path, SETTINGS, SAMPLES, short)
    with pytest.raises(DataError, match="not finite"):
        build_store(tmp_path, SETTINGS, SAMPLES, infinite)
    with pytest.raises(DataError, match="share keys"):
        build_store(tmp_path, SETTINGS, [SAMPLES[0], SAMPLES[0]], encode)
    assert not list(tmp_path.glob("*.safetensors"))
