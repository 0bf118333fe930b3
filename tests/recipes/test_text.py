"""The caption embedding without weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from zellige_lightning.errors import ConfigError
from zellige_lightning.recipes.wan21.text import HashedTextEncoder

ENCODER = HashedTextEncoder(text_len=8, text_dim=256)


def test_rows_behind_the_caption_are_exactly_zero_and_long_captions_are_cut() -> None:
    out = ENCODER.encode("Two bikes, fast!")
    assert out.shape == (8, 256)
    assert out[:3].any(dim=1).all()
    assert not out[3:].any()
    assert not ENCODER.encode("").any()
    assert torch.equal(ENCODER.encode("a b c d e f g h"), ENCODER.encode("a b c d e f g h i j"))


def test_equal_words_are_equal_like_words_are_near_and_the_scale_is_one() -> None:
    bike, bikes, moon = ENCODER.encode("bicycle Bicycles moon")[:3]
    assert torch.equal(ENCODER.encode("a BICYCLE")[1], bike)
    assert F.cosine_similarity(bike, bikes, dim=0) > 0.5
    assert abs(F.cosine_similarity(bike, moon, dim=0)) < 0.3
    assert 0.6 < torch.stack((bike, bikes, moon)).std() < 1.6


def test_settings_name_what_the_values_depend_on() -> None:
    assert HashedTextEncoder(8, 64).settings != HashedTextEncoder(8, 32).settings
    with pytest.raises(ConfigError, match="must be >= 1"):
        HashedTextEncoder(0, 64)
