"""Decoding keeps no memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.recipes.data.files import CAPS, item_of, real_clip, rules
from zellige_lightning.recipes.wan21.decoder import Decoder

_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_MIB


@pytest.mark.slow
def test_memory_is_flat_over_500_decodes() -> None:
    item = item_of(real_clip("carphone_pristine.mp4"))
    sizes: list[tuple[float, float]] = []
    with Decoder(1, rules((5, 17), max_crop=0.6), CAPS, pixels=True) as decoder:
        pid = decoder._workers[0]._process.pid
        assert pid is not None
        for done in decoder.run([item] * 500):
            assert done.decision.kept
            sizes.append((resident_mib(pid), resident_mib(os.getpid())))
    assert len(sizes) == 500
    for process in (0, 1):
        early, late = (max(size[process] for size in part) for part in (sizes[50:150], sizes[400:]))
        assert late - early < 4.0, (early, late)
