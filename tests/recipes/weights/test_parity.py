"""The model against diffusers' own Wan2.1: outputs and every gradient, through both layouts of weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from tests.recipes.packing import Packed, block_diagonal, pack, random_model
from zellige_lightning.recipes.wan21.config import WanConfig
from zellige_lightning.recipes.wan21.layouts import DIFFUSERS, ORIGINAL, to_diffusers
from zellige_lightning.recipes.wan21.model import WanModel
from zellige_lightning.recipes.wan21.patchify import unpatchify
from zellige_lightning.recipes.wan21.weights import load_weights, read_config, save_weights

CONFIGS = {
    "4 heads of 24": WanConfig(
        dim=96, ffn_dim=192, num_heads=4, num_layers=2, text_dim=64, text_len=16, freq_dim=64
    ),
    "12 heads of 8": WanConfig(
        dim=96, ffn_dim=64, num_heads=12, num_layers=3, text_dim=32, text_len=6, freq_dim=32
    ),
    "2 heads of 32": WanConfig(
        dim=64, ffn_dim=80, num_heads=2, num_layers=1, text_dim=48, text_len=9, freq_dim=256
    ),
}
# Images and clips, single rows and columns, a single token.
GRIDS = [
    *[(1, 1, 1), (1, 2, 2), (1, 4, 4), (1, 6, 10), (1, 1, 7), (1, 9, 1)],
    *[(2, 1, 1), (2, 3, 5), (3, 2, 2), (3, 6, 4), (5, 2, 3), (7, 1, 2)],
]


def theirs(model: WanModel, folder: Path) -> WanTransformer3DModel:
    save_weights(folder, model.config, model.state_dict(), layout=DIFFUSERS)
    loaded, report = WanTransformer3DModel.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return loaded


def through(model: WanModel, folder: Path, layout: str) -> WanModel:
    """The same model, written in a layout and read back."""
    save_weights(folder, model.config, model.state_dict(), layout=layout)
    sizes = {name: getattr(model.config, name) for name in ("text_len",)}
    assert {**read_config(folder).__dict__, **sizes} == model.config.__dict__
    with torch.device("meta"):
        loaded = WanModel(model.config)
    load_weights(loaded, folder)
    return loaded


def run(model: WanModel, packed: Packed, weights: list[Tensor]) -> list[Tensor]:
    """Outputs `[C, T, h, w]` of all sequences in one pack, after backward of their weighted sum."""
    lengths = packed.arguments[-1]
    with block_diagonal(model, lengths):
        parts = model(*packed.arguments).split(lengths)
        outputs = [unpatchify(part, grid) for part, grid in zip(parts, GRIDS, strict=True)]
        sum((o * w).sum() for o, w in zip(outputs, weights, strict=True)).backward()
    return [output.detach() for output in outputs]


@pytest.mark.parametrize("layout", [ORIGINAL, DIFFUSERS])
@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_equal_those_of_diffusers(name: str, layout: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    source = random_model(config, torch.float32)
    assert all(bool((p != 0).any()) for p in source.parameters())
    reference, model = theirs(source, tmp_path / "theirs"), through(source, tmp_path / "ours", layout)
    packed = pack(config, GRIDS, torch.float32)
    _, _, _, times, text, _ = packed.arguments
    weights = [torch.randn_like(x) / x.numel() for x in packed.latents]

    outputs = run(model, packed, weights)
    for i, latents in enumerate(packed.latents):
        expected = reference(latents[None], times[i, None], text[i, None]).sample[0]
        (expected * weights[i]).sum().backward()
        scale = max(1.0, expected.abs().max().item())
        assert (outputs[i] - expected).abs().max().item() <= 2e-5 * scale, GRIDS[i]
    others = dict(reference.named_parameters())
    assert set(others) == {to_diffusers(name) for name, _ in model.named_parameters()}
    grads = {name: others[to_diffusers(name)].grad for name, _ in model.named_parameters()}
    scale = max(grad.abs().max().item() for grad in grads.values() if grad is not None)
    for name, parameter in model.named_parameters():
        expected_grad = grads[name]
        assert parameter.grad is not None and expected_grad is not None, name
        assert expected_grad.abs().max() > 0, name
        assert (parameter.grad - expected_grad).abs().max().item() <= 2e-5 * scale, name


@pytest.mark.parametrize("name", CONFIGS)
def test_original_to_ours_to_diffusers_to_ours_changes_no_bit(name: str, tmp_path: Path) -> None:
    source = random_model(CONFIGS[name], torch.float32)
    ours = through(source, tmp_path / "original", ORIGINAL)
    theirs(ours, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    with torch.device("meta"):
        again = WanModel(CONFIGS[name])
    load_weights(again, tmp_path / "theirs")
    for key, values in source.state_dict().items():
        assert torch.equal(again.state_dict()[key].view(torch.int32), values.view(torch.int32)), key
