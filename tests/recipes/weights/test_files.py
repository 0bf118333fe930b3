"""Files of weights: prefixes, shards, damage, and how much is read of them."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.distributed import run_distributed
from tests.recipes.packing import random_model
from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.config import CONFIGS, WanConfig
from zellige_lightning.recipes.wan21.layouts import DIFFUSERS, LAYOUTS, ORIGINAL, to_diffusers, to_original
from zellige_lightning.recipes.wan21.model import WanModel
from zellige_lightning.recipes.wan21.tensor_files import TensorFiles
from zellige_lightning.recipes.wan21.weights import config_of_state, load_weights, read_config, save_weights

TINY = CONFIGS["tiny"]
Damage = Callable[[dict[str, Tensor]], None]
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def source() -> WanModel:
    return random_model(TINY, torch.float32)


def equal(model: WanModel, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(values, state[name]) for name, values in model.state_dict().items())


@pytest.mark.parametrize("size", ["wan21_1_3b", "wan21_14b"])
def test_names_map_one_to_one(size: str) -> None:
    with torch.device("meta"):
        names = list(WanModel(CONFIGS[size]).state_dict())
    renamed = [to_diffusers(name) for name in names]
    assert len(set(renamed)) == len(names)
    assert [to_original(name) for name in renamed] == names


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "pipe.dit."])
def test_prefixes_and_shards_of_both_layouts(
    source: WanModel, layout: str, prefix: str, tmp_path: Path
) -> None:
    files = save_weights(
        tmp_path, TINY, source.state_dict(), layout=layout, prefix=prefix, max_shard_bytes=230_000
    )
    assert len(files) > 3
    assert max(file.stat().st_size for file in files) < 240_000
    names = [name for file in files for name in load_file(file)]
    assert all(name.startswith(prefix) for name in names)
    index = json.loads((tmp_path / f"{FILE}.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(names)
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in source.parameters())
    loaded = WanModel(TINY)
    load_weights(loaded, tmp_path)
    assert equal(loaded, source.state_dict())
    files[1].unlink()
    with pytest.raises(DataError, match=f"lack .*{files[1].name}"):
        load_weights(loaded, tmp_path)


def test_a_file_that_also_holds_a_vae_is_read_by_its_prefix(source: WanModel, tmp_path: Path) -> None:
    state = {f"model.diffusion_model.{name}": values for name, values in source.state_dict().items()}
    save_file(state | {"vae.encoder.weight": torch.ones(2)}, tmp_path / "all.safetensors")
    loaded = WanModel(TINY)
    load_weights(loaded, tmp_path / "all.safetensors")
    assert equal(loaded, source.state_dict())


def test_bfloat16_files_fill_float32_parameters(source: WanModel, tmp_path: Path) -> None:
    save_weights(tmp_path, TINY, source.state_dict(), dtype=torch.bfloat16)
    assert {values.dtype for values in load_file(tmp_path / FILE).values()} == {torch.bfloat16}
    loaded = WanModel(TINY)
    load_weights(loaded, tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert equal(loaded, {name: v.bfloat16().float() for name, v in source.state_dict().items()})


def without(state: dict[str, Tensor]) -> None:
    del state["head.head.bias"]


def with_image_tensor(state: dict[str, Tensor]) -> None:
    state["img_emb.proj.0.weight"] = torch.ones(2)


def too_narrow(state: dict[str, Tensor]) -> None:
    state["blocks.1.ffn.0.weight"] = torch.ones(3, 96)


def not_finite(state: dict[str, Tensor]) -> None:
    state["blocks.1.norm3.bias"][3] = torch.nan


def of_a_vae(state: dict[str, Tensor]) -> None:
    state.clear()
    state["encoder.conv_in.weight"] = torch.ones(2)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (without, r"1 tensors are missing: head\.head\.bias"),
        (with_image_tensor, r"1 tensors are unknown: img_emb\.proj\.0\.weight"),
        (too_narrow, r"blocks\.1\.ffn\.0\.weight is \(3, 96\), the model's \(192, 96\)"),
        (not_finite, r"'blocks\.1\.norm3\.bias' holds values that are not finite"),
        (of_a_vae, r"no weights of Wan2\.1.*encoder\.conv_in"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    source: WanModel, damage: Damage, says: str, tmp_path: Path
) -> None:
    state = {name: values.clone() for name, values in source.state_dict().items()}
    damage(state)
    save_file(state, tmp_path / FILE)
    with pytest.raises(DataError, match=says):
        load_weights(WanModel(TINY), tmp_path)


def test_a_foreign_tensor_in_the_diffusers_layout_is_named(source: WanModel, tmp_path: Path) -> None:
    state = {to_diffusers(name): values for name, values in source.state_dict().items()}
    save_file(state | {"blocks.0.attn2.add_k_proj.weight": torch.ones(2)}, tmp_path / FILE)
    with pytest.raises(DataError, match=r"add_k_proj.*diffusers layout[\s\S]*text-to-video"):
        load_weights(WanModel(TINY), tmp_path)


def test_damaged_and_absent_files_are_typed_errors(source: WanModel, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no safetensors file"):
        load_weights(WanModel(TINY), tmp_path)
    save_weights(tmp_path, TINY, source.state_dict())
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be read"):
        load_weights(WanModel(TINY), tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(DataError, match="no safetensors file"):
        load_weights(WanModel(TINY), tmp_path / "weights.bin")


def test_states_that_are_not_the_models_are_not_saved(source: WanModel, tmp_path: Path) -> None:
    state = source.state_dict()
    with pytest.raises(DataError, match=r"1 tensors are not those of the model, first 'x'"):
        save_weights(tmp_path, TINY, state | {"x": torch.ones(1)})
    with pytest.raises(DataError, match="'head.head.bias' holds values that are not finite"):
        save_weights(tmp_path, TINY, state | {"head.head.bias": torch.full((64,), torch.inf)})
    with pytest.raises(ConfigError, match="layout='comfy'"):
        save_weights(tmp_path, TINY, state, layout="comfy")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_the_earlier_export(source: WanModel, tmp_path: Path) -> None:
    """The kernel refuses the write: the limit of file sizes stands for the end of the disk."""
    save_weights(tmp_path, TINY, source.state_dict())
    before = (tmp_path / FILE).read_bytes()
    code = (
        "import resource, signal, sys, torch\n"
        "from zellige_lightning.recipes.wan21.config import CONFIGS\n"
        "from zellige_lightning.recipes.wan21.model import WanModel\n"
        "from zellige_lightning.recipes.wan21.weights import save_weights\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    save_weights(sys.argv[1], CONFIGS['tiny'], WanModel(CONFIGS['tiny']).state_dict())\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("DataError 'diffusion_pytorch_model.safetensors' cannot be written"), (
        run.stdout
    )
    assert (tmp_path / FILE).read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_configuration_files(source: WanModel, tmp_path: Path) -> None:
    for layout in (ORIGINAL, DIFFUSERS):
        save_weights(tmp_path / layout, TINY, source.state_dict(), layout=layout)
    assert read_config(tmp_path / ORIGINAL) == TINY
    entries = json.loads((tmp_path / ORIGINAL / "config.json").read_text())
    (tmp_path / ORIGINAL / "config.json").write_text(json.dumps(entries | {"model_type": "i2v"}))
    with pytest.raises(ConfigError, match="image-to-video"):
        read_config(tmp_path / ORIGINAL)
    (tmp_path / ORIGINAL / "config.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        read_config(tmp_path / ORIGINAL)
    (tmp_path / ORIGINAL / "config.json").unlink()
    with pytest.raises(DataError, match=r"no config\.json"):
        read_config(tmp_path / ORIGINAL)


def test_sizes_from_shapes() -> None:
    for name in ("tiny", "wan21_1_3b", "wan21_14b"):
        with torch.device("meta"):
            shapes = {k: tuple(v.shape) for k, v in WanModel(CONFIGS[name]).state_dict().items()}
        assert config_of_state(shapes) == CONFIGS[name]
    own = WanConfig(dim=48, ffn_dim=20, num_heads=2, num_layers=1, text_dim=8, freq_dim=32)
    with torch.device("meta"):
        shapes = {k: tuple(v.shape) for k, v in WanModel(own).state_dict().items()}
    with pytest.raises(ConfigError, match="num-heads"):
        config_of_state(shapes)
    assert config_of_state(shapes, num_heads=2) == own


def sharded_load(rank: int, folder: str) -> list[int]:
    """Loads into a sharded model; returns the rows that were read of each tensor, and compares the values."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = WanModel(TINY)
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sizes: list[int] = []
    read = TensorFiles.read

    def counted(self: TensorFiles, name: str, part: tuple[slice, ...] | None = None) -> Tensor:
        values = read(self, name, part)
        sizes.append(values.numel())
        return values

    TensorFiles.read = counted  # type: ignore[method-assign]
    load_weights(model, folder)
    expected = load_file(f"{folder}/{FILE}")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor().detach(), expected[name]), name  # type: ignore[attr-defined]
    return [sum(sizes)]


def test_a_sharded_model_reads_only_its_own_rows(source: WanModel, tmp_path: Path) -> None:
    save_weights(tmp_path, TINY, source.state_dict(), layout=ORIGINAL)
    total = sum(p.numel() for p in source.parameters())
    (first,), (second,) = run_distributed(sharded_load, 2, str(tmp_path))
    assert first + second == total  # odd numbers of rows as well
    assert max(first, second) < 0.6 * total


LARGE = WanConfig(
    dim=1024, ffn_dim=4096, num_heads=8, num_layers=6, text_dim=256, freq_dim=64
)  # 437 MB in fp32


def growth_while_saving_and_loading(rank: int, folder: str) -> list[float]:
    """Peak memory above the model's own, in shares of the model."""
    model = WanModel(LARGE)
    size = sum(p.numel() * 4 for p in model.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    save_weights(folder, LARGE, model.state_dict())
    saved = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [size, (saved - before) / size]


@pytest.mark.slow
def test_saving_never_holds_a_second_copy(tmp_path: Path) -> None:
    ((size, growth),) = run_distributed(growth_while_saving_and_loading, 1, str(tmp_path), timeout_s=300)
    assert size > 300e6
    assert growth < 0.2
