"""Helpers: what a store holds, and encoding in a process that can be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zellige_lightning.placement import Bucket, Sequence
from zellige_lightning.recipes.wan21 import encode_cli
from zellige_lightning.recipes.wan21.encoded_row import crc_of
from zellige_lightning.recipes.wan21.encoded_store import EncodedStore

Command = Callable[..., None]


def sequence_of(store: EncodedStore, key: str) -> Sequence:
    (sample,) = [sample for sample in store.samples if sample.key == key]
    return Sequence(0, key, Bucket("b", sample.grid))


def contents(folder: Path) -> dict[str, tuple[object, ...]]:
    """Key -> all that a reader of the store sees of it."""
    store = EncodedStore(folder)
    store.verify()
    found = {}
    for sample in store.samples:
        sequence = sequence_of(store, sample.key)
        latents = store.read_tokens(sequence, range(sequence.num_tokens))["latents"]
        text = store.read_sequence(sequence)["text"]
        found[sample.key] = (sample.grid, store.caption(sample.key), crc_of(latents), crc_of(text))
    return found


def count_encodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with every call of the codec."""
    calls: list[int] = []
    load = encode_cli.load_codec

    def counting(*args: object) -> object:
        codec = load(*args)  # type: ignore[arg-type]
        inner = codec.encode

        def one(frames: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return inner(frames)

        codec.encode = one  # type: ignore[method-assign]
        return codec

    monkeypatch.setattr(encode_cli, "load_codec", counting)
    return calls


def start(source: Path, out: Path, tiny_buckets: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "zellige_lightning.recipes.wan21.encode_cli", str(source), "--quiet"]
    command += ["--output", str(out), "--buckets", str(tiny_buckets), "--workers", "1", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def wait_for_parts(process: subprocess.Popen[str], out: Path, count: int) -> None:
    deadline = time.monotonic() + 120
    while len(list(out.glob("parts/*.safetensors"))) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
