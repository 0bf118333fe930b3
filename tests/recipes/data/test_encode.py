"""`zellige-encode`: real media through a tiny VAE, and the store as training data."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tests.recipes.data.files import (
    REAL_CLIPS,
    REAL_IMAGES,
    captioned,
    copy_to,
    item_of,
    real_clip,
    rules,
    write_clip,
    write_tar,
)
from tests.recipes.data.stores import Command, contents, sequence_of
from zellige_lightning.datamodule import ZelligeDataModule
from zellige_lightning.errors import DataError
from zellige_lightning.placement import Bucket, Sequence
from zellige_lightning.recipes.wan21.buckets import load_rules
from zellige_lightning.recipes.wan21.decision import decide, read_pixels
from zellige_lightning.recipes.wan21.encoded_store import EncodedStore, open_store
from zellige_lightning.recipes.wan21.media import find_media
from zellige_lightning.recipes.wan21.patchify import unpatchify
from zellige_lightning.recipes.wan21.probe import Caps
from zellige_lightning.recipes.wan21.vae import load_codec
from zellige_lightning.sources import TokenSource

# ---- real media ----


def test_real_media_become_a_token_source(
    tmp_path: Path, encode: Command, tiny_vae: Path, tiny_buckets: Path
) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    for name in REAL_CLIPS:
        copy_to(real_clip(name), folder)
    for package, names in REAL_IMAGES.items():
        for name in names:
            copy_to(find_media(package, name), folder)
    encode(folder)
    store = open_store(tmp_path / "out")
    assert isinstance(store, EncodedStore)
    assert isinstance(store, TokenSource)
    store.verify()
    assert len(store) == len(REAL_CLIPS) + sum(map(len, REAL_IMAGES.values()))
    assert {sample.grid[0] for sample in store.samples} == {1, 2}
    assert store.caption("bikes.mp4") == "caption of bikes.mp4"

    sequence = sequence_of(store, "bikes.mp4")
    whole = store.read_tokens(sequence, range(sequence.num_tokens))["latents"]
    part = store.read_tokens(sequence, range(3, 17))["latents"]
    assert torch.equal(part, whole[3:17])
    item, wanted = item_of(real_clip("bikes.mp4")), load_rules(str(tiny_buckets))
    decision, found = decide(item, wanted, Caps())
    assert found is not None
    codec = load_codec(str(tiny_vae), torch.device("cpu"), torch.float32)
    frames = read_pixels(item, decision, found, wanted, Caps())
    expected = codec.encode(frames)
    assert decision.shape.bucket.grid == sequence.bucket.grid
    assert torch.equal(unpatchify(whole, sequence.bucket.grid), expected.half())
    rows = pq.read_table(tmp_path / "out" / "manifest.parquet").to_pylist()
    rates = {round(json.loads(row["decision"])["source_fps"], 2) for row in rows}
    assert rates == {0.0, 25.0, 29.97}


def test_the_latent_of_an_image_is_the_first_of_its_video(tmp_path: Path, encode: Command) -> None:
    """The first frame of a clip, saved without loss, gives to the last bit the first latent of the clip."""
    folder = tmp_path / "media"
    folder.mkdir()
    clip = copy_to(real_clip("carphone_pristine.mp4"), folder)
    wanted = rules((1, 5), max_crop=0.6)
    decision, found = decide(item_of(clip), wanted, Caps())
    assert found is not None
    frame = read_pixels(item_of(clip), decision, found, wanted, Caps())[:, 0]
    Image.fromarray(frame.permute(1, 2, 0).numpy()).save(folder / "first.png")
    captioned(folder / "first.png")
    encode(folder)
    store = EncodedStore(tmp_path / "out")
    image, video = sequence_of(store, "first.png"), sequence_of(store, clip.name)
    assert image.bucket.grid[1:] == video.bucket.grid[1:]
    first = store.read_tokens(video, range(image.num_tokens))["latents"]
    assert torch.equal(store.read_tokens(image, range(image.num_tokens))["latents"], first)
    assert first.float().std() > 0.01


def test_tars_tables_and_folders_give_the_same_latents(tmp_path: Path, images: Path, encode: Command) -> None:
    members = {path.name: path.read_bytes() for path in images.iterdir()}
    tar = write_tar(tmp_path / "shard.tar", members)
    rows = "".join(f'{{"path": "{i}.png", "text": "picture {i}"}}\n' for i in range(9))
    (images.parent / "table.jsonl").write_text(rows)
    encode(images)
    encode(tar, out="tar")
    encode(images.parent / "table.jsonl", "--media-root", str(images), "--preset", "opensora", out="table")
    folder = contents(tmp_path / "out")
    assert contents(tmp_path / "table") == folder
    assert {k.removeprefix("shard/"): v for k, v in contents(tmp_path / "tar").items()} == folder


# ---- as training data ----


def test_training_reads_the_store_by_configuration(tmp_path: Path, images: Path, encode: Command) -> None:
    from hydra import compose, initialize_config_module

    from zellige_lightning.instantiate import instantiate

    captioned(write_clip(images / "clip.mp4", 20))
    encode(images)
    with initialize_config_module("zellige_lightning.conf", version_base="1.3"):
        config = compose(
            "train", ["data=latents", "catalog=wan21", f"data.datamodule.folder={tmp_path / 'out'}"]
        )
        data = instantiate(config.data, "data")
    assert isinstance(data, ZelligeDataModule)
    data.setup("fit")
    keys = [sequence.key for batch in data.train_dataloader() for sequence in batch.sequences]
    assert sorted(keys) == [*(f"{i}.png" for i in range(9)), "clip.mp4"]


def test_stores_work_in_loader_processes(tmp_path: Path, images: Path, encode: Command) -> None:
    encode(images)
    store = EncodedStore(tmp_path / "out")
    store.read_tokens(sequence_of(store, "0.png"), range(2))
    loader = DataLoader(store, batch_size=None, num_workers=1)  # type: ignore[arg-type]
    assert [sample.key for sample in loader] == [f"{i}.png" for i in range(9)]
    with pytest.raises(DataError, match="has no sample 'gone'"):
        store.read_sequence(Sequence(0, "gone", Bucket("b", (1, 4, 4))))
    with pytest.raises(DataError, match="its bucket .* asks for 20"):
        store.read_tokens(Sequence(0, "0.png", Bucket("b", (1, 4, 5))), range(2))


def test_silent_damage_is_found_by_its_checksum(tmp_path: Path, images: Path, encode: Command) -> None:
    encode(images)
    (shard,) = (tmp_path / "out").glob("shard-*")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(DataError, match=rf"sample '\d\.png' in '{shard.name}' are corrupt"):
        EncodedStore(tmp_path / "out").verify()
