"""Decoding in processes that may hang, die, and are replaced."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from tests.recipes.data.files import (
    CAPS,
    item_of,
    pixels_of,
    real_clip,
    real_images,
    rules,
    write_clip,
    write_image,
)
from zellige_lightning.recipes.wan21.decision import (
    decide,
)
from zellige_lightning.recipes.wan21.decoder import Decoder
from zellige_lightning.recipes.wan21.probe import Caps


def test_a_medium_that_takes_too_long_costs_one_process(tmp_path: Path) -> None:
    slow, quick = item_of(real_clip("bigbuckbunny.mp4")), item_of(write_image(tmp_path / "b.png"))
    caps = Caps(max_seconds=0.02)
    with Decoder(1, rules((1, 81), (704, 1280)), caps, pixels=True) as decoder:
        (late,) = decoder.run([slow])
    assert late.decision.reason == "decoding took more than 0.02 s"
    assert late.decision.kind == "unreadable"
    with Decoder(1, rules((1, 5)), CAPS, pixels=True) as decoder:
        (fine,) = decoder.run([quick])
    assert fine.pixels is not None


def test_a_decoder_that_dies_is_named_and_replaced(tmp_path: Path) -> None:
    items = [item_of(write_image(tmp_path / "a.png")), item_of(real_clip("bigbuckbunny.mp4"))]
    items.append(item_of(write_image(tmp_path / "c.png")))
    with Decoder(1, rules((1, 81), (704, 1280), min_area=0.001), CAPS, pixels=True) as decoder:
        run = decoder.run(items)
        assert next(run).decision.kept
        decoder._workers[0]._process.kill()  # it has begun with the second
        died, after = list(run)
    assert died.item.name == "bigbuckbunny.mp4"
    assert died.decision.reason == "the decoder ended with code -9"
    assert after.decision.kept


def test_processes_and_one_process_agree(tmp_path: Path) -> None:
    items = [item_of(path) for path in real_images()] + [item_of(real_clip("carphone_pristine.mp4"))]
    wanted = rules((1, 5))
    with Decoder(2, wanted, CAPS, pixels=True) as decoder:
        done = {d.item.name: d for d in decoder.run(items)}
    assert len(done) == len(items)
    for item in items:
        pixels = done[item.name].pixels
        assert pixels is not None
        assert torch.equal(pixels, pixels_of(item, wanted))


def test_a_cut_of_a_longer_video(tmp_path: Path) -> None:
    path = write_clip(tmp_path / "long.mp4", 160, rate=Fraction(16))
    wanted = rules((5, 9, 17))
    part = item_of(path, start_s=4.0, end_s=4.75)
    decision = decide(part, wanted, CAPS)[0]
    assert (decision.frames_retimed, decision.frames_kept) == (12, 9)
    bright = pixels_of(part, wanted)[:, :, :, 40:].float().mean(dim=(0, 2, 3))
    expected = 20.0 + 2.0 * np.arange(64, 73)
    assert np.abs(bright.numpy() - expected).max() < 2.0
    beyond = decide(item_of(path, start_s=30.0, end_s=31.0), wanted, CAPS)[0]
    assert "it ends at second 10.00, before the cut at 30.00 begins" in beyond.reason
