"""The packed Wan2.1 against an independent dense one, its sizes, and its edges."""

from __future__ import annotations

import pytest
import torch

from tests.recipes.packing import block_diagonal, pack, random_model
from tests.recipes.reference_wan import wan
from zellige_lightning.errors import ConfigError
from zellige_lightning.recipes.wan21.config import CONFIGS, WanConfig, named_config
from zellige_lightning.recipes.wan21.layers import FullPrecisionLinear, add_gated, modulate, rope_table
from zellige_lightning.recipes.wan21.model import WanModel
from zellige_lightning.recipes.wan21.patchify import unpatchify

TINY = CONFIGS["tiny"]
HEADS_OF_EIGHT = WanConfig(
    dim=96, ffn_dim=64, num_heads=12, num_layers=2, text_dim=32, text_len=6, freq_dim=32
)
GRIDS = [(1, 3, 4), (3, 2, 3), (2, 4, 2)]


@pytest.mark.parametrize("config", [TINY, HEADS_OF_EIGHT], ids=["heads of 24", "heads of 8"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_model_equals_dense_reference_and_its_gradients(
    config: WanConfig, checkpointing: bool
) -> None:
    model = random_model(config, torch.float64, activation_checkpointing=checkpointing)
    packed = pack(config, GRIDS, torch.float64)
    _, _, _, times, text, lengths = packed.arguments
    with block_diagonal(model, lengths):
        velocity = model(*packed.arguments)
        velocity.square().sum().backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = [
        wan(weights, config.num_heads, x, t.item(), c)
        for x, t, c in zip(packed.latents, times, text, strict=True)
    ]
    for part, grid, dense in zip(velocity.split(lengths), GRIDS, expected, strict=True):
        torch.testing.assert_close(unpatchify(part, grid), dense, rtol=1e-10, atol=1e-10)
    sum(dense.square().sum() for dense in expected).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-8, atol=1e-8, msg=name)


def test_a_segment_does_not_see_its_neighbours() -> None:
    model = random_model(TINY, torch.float32)
    packed = pack(TINY, GRIDS, torch.float32)
    tokens, positions, segment_ids, times, text, lengths = packed.arguments
    with block_diagonal(model, lengths):
        together = model(*packed.arguments).split(lengths)
    for i, n in enumerate(lengths):
        mine = segment_ids == i
        alone = model(  # no engine: plain attention is right for a single sequence
            tokens[mine],
            positions[mine],
            torch.zeros(n, dtype=torch.int64),
            times[i, None],
            text[i, None],
            [n],
        )
        torch.testing.assert_close(together[i], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "count"), [("wan21_1_3b", 1_418_996_800), ("wan21_14b", 14_288_491_584)])
def test_published_sizes(name: str, count: int) -> None:
    with torch.device("meta"):
        model = WanModel(named_config(name))
    assert sum(p.numel() for p in model.parameters()) == count


def test_names_and_shapes_are_those_of_the_original() -> None:
    with torch.device("meta"):
        model = WanModel(named_config("wan21_1_3b"))
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    assert len(shapes) == 825
    assert shapes["patch_embedding.weight"] == (1536, 16, 1, 2, 2)
    assert shapes["text_embedding.0.weight"] == (1536, 4096)
    assert shapes["time_projection.1.weight"] == (6 * 1536, 1536)
    assert shapes["blocks.29.modulation"] == (1, 6, 1536)
    assert shapes["blocks.0.norm3.bias"] == shapes["blocks.0.self_attn.norm_q.weight"] == (1536,)
    assert shapes["blocks.0.ffn.2.weight"] == (1536, 8960)
    assert shapes["head.head.weight"] == (64, 1536)
    assert shapes["head.modulation"] == (1, 2, 1536)


def test_a_rank_without_tokens_gives_every_parameter_a_zero_gradient() -> None:
    model = random_model(TINY, torch.float32, activation_checkpointing=True)
    packed = pack(TINY, [], torch.float32)
    with block_diagonal(model, []):
        velocity = model(*packed.arguments)
        velocity.sum().backward()
    assert velocity.shape == (0, 64)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_an_empty_segment_among_others_changes_nothing() -> None:
    model = random_model(TINY, torch.float64)
    tokens, positions, segment_ids, times, text, lengths = pack(TINY, GRIDS, torch.float64).arguments
    with block_diagonal(model, lengths):
        expected = model(tokens, positions, segment_ids, times, text, lengths)
    moved = segment_ids + (segment_ids >= 1)
    more_times = torch.cat((times[:1], times[:1] + 7.0, times[1:]))
    more_text = torch.cat((text[:1], text[:1] - 1.0, text[1:]))
    with block_diagonal(model, [lengths[0], 0, *lengths[1:]]):
        got = model(tokens, positions, moved, more_times, more_text, [lengths[0], 0, *lengths[1:]])
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mixed", [False, True], ids=["bf16-true", "bf16-mixed"])
def test_bf16_stays_near_full_precision(mixed: bool) -> None:
    packed = pack(TINY, GRIDS, torch.float32)
    lengths = packed.arguments[-1]
    exact = random_model(TINY, torch.float32)
    model = random_model(TINY, torch.float32 if mixed else torch.bfloat16, activation_checkpointing=True)
    with block_diagonal(exact, lengths):
        expected = exact(*packed.arguments)
    with block_diagonal(model, lengths), torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        velocity = model(*packed.arguments)
        velocity.square().mean().backward()
    assert velocity.dtype == torch.float32
    assert (velocity - expected).norm() < 0.03 * expected.norm()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_time_layers_keep_fp32_under_autocast() -> None:
    layer = FullPrecisionLinear(32, 32)
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        inside = layer(x)
    assert torch.equal(inside, layer(x))


def test_modulation_gradients_with_an_empty_segment() -> None:
    lengths = torch.tensor([3, 0, 2])
    ids = torch.tensor([0, 0, 0, 2, 2])
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 4, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    tables = [torch.randn(3, 4, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda a, b, c: modulate(a, b, c, ids, lengths), (x, *tables))
    assert torch.autograd.gradcheck(lambda a, b, c: add_gated(a, b, c, ids, lengths), (x, y, tables[0]))


def test_rope_splits_a_head_of_128_as_22_21_21_and_keeps_absolute_positions() -> None:
    assert named_config("wan21_1_3b").rope_pairs == (22, 21, 21)
    far = torch.tensor([[60, 67, 119]])
    table = rope_table(far, (22, 21, 21))[0, 0]
    assert table.dtype == torch.complex128
    assert table[0].item() == pytest.approx(
        complex(torch.tensor(60.0).double().cos(), torch.tensor(60.0).double().sin())
    )
    last = 119 / 10000 ** (20 / 21)
    assert table[-1].imag.item() == pytest.approx(
        torch.tensor(last, dtype=torch.float64).sin().item(), abs=1e-12
    )


def test_first_velocity_is_zero_and_initial_weights_are_the_originals() -> None:
    torch.manual_seed(0)
    model = WanModel(TINY)
    packed = pack(TINY, GRIDS, torch.float32)
    with block_diagonal(model, packed.arguments[-1]):
        assert not model(*packed.arguments).any()
    assert model.text_embedding[0].weight.std().item() == pytest.approx(0.02, rel=0.1)
    bound = (6 / (96 + 192)) ** 0.5
    assert 0.95 * bound < model.blocks[0].ffn[0].weight.abs().max().item() <= bound
    assert not model.blocks[0].self_attn.q.bias.any()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dim": 100, "num_heads": 3}, "no multiple of num_heads"),
        ({"dim": 16, "num_heads": 4}, "heads of 4"),
        ({"dim": 36, "num_heads": 4}, "heads of 9"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"ffn_dim": 1.5}, "ffn_dim=1.5"),
        ({"freq_dim": 63}, "make it even"),
        ({"eps": 0.0}, "eps"),
    ],
)
def test_impossible_sizes_are_named(changes: dict[str, int], says: str) -> None:
    sizes = {"dim": 96, "ffn_dim": 192, "num_heads": 4, "num_layers": 2} | changes
    with pytest.raises(ConfigError, match=says):
        WanConfig(**sizes)


def test_unknown_size_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="tiny, demo, wan21_1_3b, wan21_14b"):
        named_config("wan22")
