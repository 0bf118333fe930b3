"""AutoencoderKLWan as a codec: causality, normalisation, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan

from tests.recipes.data.files import make_tiny_vae
from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.codec import DctCodec
from zellige_lightning.recipes.wan21.vae import WanVae, load_codec, weights_digest

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def codec(tiny_vae: Path) -> WanVae:
    codec = load_codec(str(tiny_vae), CPU, torch.float32)
    assert isinstance(codec, WanVae)
    return codec


def clip(frames: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, frames, 32, 48), dtype=torch.uint8, generator=generator)


def test_an_image_is_the_first_latent_of_its_video_and_a_prefix_its_prefix(codec: WanVae) -> None:
    frames = clip(9)
    whole = codec.encode(frames)
    assert whole.shape == (16, 3, 4, 6)
    assert torch.equal(codec.encode(frames[:, :1]), whole[:, :1])
    assert torch.equal(codec.encode(frames[:, :5]), whole[:, :2])


def test_latents_are_the_mean_normalised_by_the_configuration(codec: WanVae) -> None:
    frames = clip(5)
    pixels = frames[None].float() / 127.5 - 1.0
    with torch.no_grad():
        mean = codec.model.encode(pixels).latent_dist.mean
    shape = (1, 16, 1, 1, 1)
    config = codec.model.config
    expected = (mean - torch.tensor(config.latents_mean).view(shape)) / torch.tensor(config.latents_std).view(
        shape
    )
    torch.testing.assert_close(codec.encode(frames), expected[0])
    assert config.latents_mean[:3] == [-0.7571, -0.7089, -0.9113]
    assert torch.equal(codec.encode(frames), codec.encode(frames))  # no sampling
    torch.testing.assert_close(
        codec.encode(frames.float() / 255.0), codec.encode(frames), rtol=1e-4, atol=1e-4
    )


def test_decoding_undoes_the_normalisation(codec: WanVae) -> None:
    frames = clip(5)
    pixels = frames[None].float() / 127.5 - 1.0
    with torch.no_grad():
        direct = codec.model.decode(codec.model.encode(pixels).latent_dist.mode()).sample[0]
    decoded = codec.decode(codec.encode(frames))
    assert decoded.shape == (3, 5, 32, 48)
    torch.testing.assert_close(decoded, (direct / 2.0 + 0.5).clamp(0, 1), rtol=1e-3, atol=1e-4)


def test_shapes_that_the_vae_would_silently_cut(codec: WanVae) -> None:
    with pytest.raises(DataError, match=r"6 frames[\s\S]*5 or 9"):
        codec.encode(clip(9)[:, :6])
    with pytest.raises(DataError, match=r"pictures of \(32, 47\) pixels"):
        codec.encode(clip(1)[..., :47])


def test_weights_are_known_by_their_values(codec: WanVae, tmp_path: Path) -> None:
    again = AutoencoderKLWan.from_pretrained(make_tiny_vae(tmp_path / "same"))
    assert WanVae(again).settings == codec.settings
    with torch.no_grad():
        again.quant_conv.bias[0] += 1e-3
    assert WanVae(again).settings["vae_weights"] != codec.settings["vae_weights"]
    assert weights_digest(again) != weights_digest(codec.model)


def test_pipelines_keep_the_vae_in_a_folder_of_its_own(tmp_path: Path, codec: WanVae) -> None:
    make_tiny_vae(tmp_path / "vae")
    assert load_codec(str(tmp_path), CPU, torch.float32).settings == codec.settings
    assert isinstance(load_codec("demo", CPU, torch.float32), DctCodec)


def test_what_is_no_vae_of_wan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no VAE could be loaded"):
        load_codec(str(tmp_path), CPU, torch.float32)
    torch.manual_seed(0)
    model = AutoencoderKLWan(
        base_dim=8, num_res_blocks=1, z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="4 latent channels, Wan2.1 has 16"):
        load_codec(str(tmp_path), CPU, torch.float32)
    model.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    with pytest.raises(ConfigError, match="no VAE could be loaded"):
        load_codec(str(tmp_path / "pickled"), CPU, torch.float32)
