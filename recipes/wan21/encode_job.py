"""Encodes a listing into a folder that can be read as a token source: restartable at any kill, by any ranks.

A folder holds

- `settings.json`: all that the values depend on; another VAE, text encoder or bucket rule is refused,
- `shard-<digest>.safetensors`: many samples each,
- `parts/`: single samples that are not in a shard yet, so that a kill costs the sample in work and no more,
- `skipped/<rank>-of-<world size>.jsonl`: what this run could not use, and why,
- `manifest.parquet` and `decisions.csv`, written when every entry of the listing is encoded or skipped.

Sample i of the listing is that of rank i modulo world size, which never depends on what is done already. No
rank waits for another: the last one to finish finds nothing missing and writes the manifest.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.decision import Decision, to_csv
from zellige_lightning.recipes.wan21.encoded_row import (
    EncodedRow,
    all_rows,
    checked,
    crc_of,
    read_rows,
    write_samples,
)
from zellige_lightning.recipes.wan21.encoded_store import write_manifest
from zellige_lightning.recipes.wan21.manifest import MediaItem, content_digest
from zellige_lightning.recipes.wan21.patchify import patchify
from zellige_lightning.recipes.wan21.ranks import Rank
from zellige_lightning.recipes.wan21.store import ENCODE_AGAIN
from zellige_lightning.recipes.wan21.tensor_files import write_text

SETTINGS = "settings.json"
SHARD_BYTES = 256 << 20
_TORN_AFTER_S = 3600.0


class EncodeJob:
    """This rank's share of encoding a listing into `folder`.

    Args:
        items: the whole listing, the same on every rank.
        settings: all that the values depend on besides the media; JSON types.
        shard_bytes: size from which parts become a shard.

    Raises:
        DataError: the folder cannot be written, or holds samples of other settings.
    """

    def __init__(
        self,
        folder: Path,
        items: list[MediaItem],
        settings: Mapping[str, Any],
        rank: Rank,
        *,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.folder, self.items, self.rank = folder, items, rank
        self._settings = json.loads(json.dumps(dict(settings)))
        self._shard_bytes = shard_bytes
        self._claim_folder()
        self.share = items[rank.rank :: rank.world_size]
        self._skipped = folder / "skipped" / f"{rank.rank}-of-{rank.world_size}.jsonl"
        self._forget_skipped()
        self._forget_torn_files()
        done = self._done()
        self._parts = {item.key: self._part(item.key) for item in self.share if done.get(item.key) == "parts"}
        self.missing = [item for item in self.share if item.key not in done]

    def _claim_folder(self) -> None:
        path = self.folder / SETTINGS
        try:
            if path.is_file():
                stored = json.loads(path.read_text())
                _compare(self.folder, stored, self._settings)
                return
        except ValueError as error:
            raise DataError(f"{SETTINGS} of {self.folder.name!r} is damaged", fix=ENCODE_AGAIN) from error
        write_text(path, json.dumps(self._settings, indent=1, sort_keys=True))

    def _forget_skipped(self) -> None:
        """What failed before is tried again; runs of another number of ranks are over."""
        write_text(self._skipped, "")
        for path in self._skipped.parent.glob("*.jsonl"):
            if not path.name.endswith(f"-of-{self.rank.world_size}.jsonl"):
                path.unlink(missing_ok=True)

    def _forget_torn_files(self) -> None:
        """What kills within a write have left. Other ranks may be writing now, but none for an hour."""
        for path in [*self.folder.glob(".*.safetensors.*"), *self.folder.glob("parts/.*.safetensors.*")]:
            with suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _TORN_AFTER_S:
                    path.unlink()

    def _part(self, key: str) -> Path:
        return self.folder / "parts" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"

    def _done(self) -> dict[str, str]:
        """Key -> `shards` or `parts`, for the samples of this share that need no encoding."""
        done: dict[str, str] = {}
        rows = _latest(row for _, row in all_rows(self.folder))
        for item in self.share:
            part = self._part(item.key)
            if item.key in rows and _fits(rows[item.key], item):
                done[item.key] = "shards"
                part.unlink(missing_ok=True)  # its shard was written, then came a kill
            elif part.is_file() and any(_fits(row, item) for row in read_rows(part)):
                done[item.key] = "parts"
        return done

    def add(self, item: MediaItem, decision: Decision, sha256: str, latents: Tensor, text: Tensor) -> None:
        """Keep a sample: latents `[16, T, h, w]`, text `[text_len, text_dim]`. Raises: DataError."""
        grid = decision.shape.bucket.grid
        stored, words = checked(item.key, grid, patchify(latents), text)
        checksums = crc_of(stored), crc_of(words)
        row = EncodedRow(
            *(item.key, *grid, item.caption, len(words), json.dumps(decision.to_json())),
            *(item.request, item.stamp(), sha256, *checksums, time.time_ns()),
        )
        tensors = {f"latents/{item.key}": stored, f"text/{item.key}": words}
        self._parts[item.key] = self._part(item.key)
        write_samples(self._parts[item.key], [row], tensors.__getitem__)
        if sum(path.stat().st_size for path in self._parts.values()) >= self._shard_bytes:
            self._pack()

    def skip(self, decision: Decision) -> None:
        """Keep why an entry is no sample. Raises: DataError."""
        try:
            with self._skipped.open("a") as file:
                file.write(json.dumps(decision.to_json()) + "\n")
        except OSError as error:
            raise DataError(
                f"{self._skipped.name!r} cannot be written: {error.strerror}", fix="free space"
            ) from error

    def _pack(self) -> None:
        """Parts become a shard; only then they are deleted."""
        files = {key: path for key, path in sorted(self._parts.items()) if path.is_file()}
        rows = [row for path in files.values() for row in read_rows(path)]
        if not rows:
            return
        identity = hashlib.sha256("|".join(f"{r.key}:{r.request}:{r.written_ns}" for r in rows).encode())

        def fetch(name: str) -> Tensor:
            with safe_open(files[name.split("/", 1)[1]], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor

        write_samples(self.folder / f"shard-{identity.hexdigest()[:16]}.safetensors", rows, fetch)
        for path in files.values():
            path.unlink(missing_ok=True)
        self._parts.clear()

    def finish(self, unlisted: Iterable[Decision]) -> list[Decision] | None:
        """Pack what is left; write the manifest if no rank has anything left to do.

        Args:
            unlisted: decisions of the listing itself, for `decisions.csv`.

        Returns:
            The decisions on all entries, or None while other ranks are at work.

        Raises:
            DataError: no sample could be encoded at all.
        """
        self._pack()
        rows = _latest(_with_shard(self.folder))
        skipped = self._skipped_by_all()
        rows = {
            item.key: rows[item.key]
            for item in self.items
            if item.key not in skipped and item.key in rows and rows[item.key].request == item.request
        }
        if any(item.key not in rows and item.key not in skipped for item in self.items):
            return None
        decisions = [skipped.get(item.key) or _decision(rows[item.key]) for item in self.items]
        decisions += list(unlisted)
        write_text(self.folder / "decisions.csv", to_csv(decisions))
        if not rows:
            raise DataError(
                f"none of {len(self.items)} media could be used; the reasons are in decisions.csv",
                fix="choose other --buckets, or other media",
            )
        write_manifest(self.folder, self._settings, list(rows.values()))
        return decisions

    def _skipped_by_all(self) -> dict[str, Decision]:
        """What the ranks of this run could not use, by key. A last line that a kill has cut is not one."""
        skipped: dict[str, Decision] = {}
        for path in self._skipped.parent.glob(f"*-of-{self.rank.world_size}.jsonl"):
            for line in path.read_text().splitlines():
                try:
                    decision = Decision(**json.loads(line))
                except (ValueError, TypeError):
                    continue
                skipped[decision.key] = decision
        return skipped


def _with_shard(folder: Path) -> Iterable[EncodedRow]:
    return (replace(row, shard=path.name) for path, row in all_rows(folder))


def _latest(rows: Iterable[EncodedRow]) -> dict[str, EncodedRow]:
    """By key, the row that was written last."""
    latest: dict[str, EncodedRow] = {}
    for row in rows:
        if row.key not in latest or latest[row.key].written_ns < row.written_ns:
            latest[row.key] = row
    return latest


def _fits(row: EncodedRow, item: MediaItem) -> bool:
    """Whether the row is of this caption, cut and file: by its time and size, else by its content."""
    if row.request != item.request:
        return False
    try:
        return row.stamp == item.stamp() or row.sha256 == content_digest(item)
    except (DataError, OSError):
        return False  # it is gone: the decoder will say so


def _decision(row: EncodedRow) -> Decision:
    return Decision(**json.loads(row.decision))


def _compare(folder: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    different = sorted(name for name in {*stored, *wanted} if stored.get(name) != wanted.get(name))
    if different:
        text = "; ".join(f"{n}: {stored.get(n)!r} there, {wanted.get(n)!r} now" for n in different)
        raise DataError(
            f"{folder.name!r} holds samples of other settings ({text})",
            fix="encode into another folder, or with the VAE, text encoder and buckets of this one",
        )
