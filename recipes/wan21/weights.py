"""Loads and saves the weights of a `WanModel` in either layout, one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.config import CONFIGS, WanConfig
from zellige_lightning.recipes.wan21.layouts import (
    DIFFUSERS,
    LAYOUTS,
    common_prefix,
    config_entries,
    config_from_entries,
    layout_of,
    to_diffusers,
    to_original,
)
from zellige_lightning.recipes.wan21.tensor_files import Entry, TensorFiles, write_sharded, write_text

_SHOWN = 5  # names in a message
MAX_SHARD_BYTES = 5 << 30


def read_config(path: Path | str) -> WanConfig:
    """Sizes of published weights, from the `config.json` beside them.

    Raises:
        DataError: no weights, or no such file. ConfigError: not a text-to-video model.
    """
    with TensorFiles(path) as files:
        config = files.folder / "config.json"
    if not config.is_file():
        raise DataError(
            f"{files.folder.name!r} has no config.json",
            fix="copy the one that was published with the weights",
        )
    try:
        entries = json.loads(config.read_text())
    except ValueError as error:
        raise DataError(
            f"config.json in {files.folder.name!r} is damaged: {error}", fix="restore it"
        ) from error
    return config_from_entries(entries)


@torch.no_grad()
def load_weights(model: nn.Module, path: Path | str, device: torch.device | str = "cpu") -> None:
    """Fill every parameter of `model` from safetensors of either layout, with or without a known prefix.

    One tensor is in memory at a time. A parameter that FSDP2 has sharded reads only its own rows; a parameter
    on the meta device is replaced by the values read: a large model needs no memory for initial ones.
    Values are converted to the parameter's type.

    Args:
        model: a `WanModel`, or one whose blocks are sharded.
        device: where parameters go that are on the meta device.

    Raises:
        DataError: tensors missing, unknown, of another shape or not finite; all of a kind are named at once.
    """
    with TensorFiles(path) as files:
        stored = _stored_names(files)
        parameters = dict(model.named_parameters())
        _check_names(set(parameters), set(stored), files)
        _check_shapes(parameters, stored, files)
        for name, parameter in parameters.items():
            values = files.read(stored[name], _own_part(parameter))
            if not bool(torch.isfinite(values).all()):
                raise DataError(
                    f"tensor {stored[name]!r} holds values that are not finite", fix="use other weights"
                )
            _fill(model, name, parameter, values, device)


def _stored_names(files: TensorFiles) -> dict[str, str]:
    """Name in the model -> name in the files."""
    prefix = common_prefix(files.names)
    inner = {name.removeprefix(prefix): name for name in files.names if name.startswith(prefix)}
    original = to_original if layout_of(inner) == DIFFUSERS else _unchanged
    return {original(name): stored for name, stored in inner.items()}


def _unchanged(name: str) -> str:
    return name


def _check_names(wanted: set[str], found: set[str], files: TensorFiles) -> None:
    problems = [
        f"{len(names)} tensors {what}: {', '.join(sorted(names)[:_SHOWN] + ['...'] * (len(names) > _SHOWN))}"
        for what, names in (("are missing", wanted - found), ("are unknown", found - wanted))
        if names
    ]
    if problems:
        raise DataError(
            f"the weights in {files.folder.name!r} do not fit the model: {'; '.join(problems)}",
            fix="choose the model size of these weights, for example model=wan21_14b",
        )


def _check_shapes(parameters: Mapping[str, Tensor], stored: Mapping[str, str], files: TensorFiles) -> None:
    wrong = [
        f"{stored[name]} is {files.shape(stored[name])}, the model's {tuple(p.shape)}"
        for name, p in parameters.items()
        if files.shape(stored[name]) != tuple(p.shape)
    ]
    if wrong:
        raise DataError(
            f"the weights in {files.folder.name!r} do not fit the model: {'; '.join(wrong[:_SHOWN])}",
            fix="choose the model size of these weights, for example model=wan21_14b",
        )


def _own_part(parameter: Tensor) -> tuple[slice, ...] | None:
    """The rows of a sharded parameter that live on this rank; None for all."""
    if not isinstance(parameter, DTensor):
        return None
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def _fill(
    model: nn.Module, name: str, parameter: nn.Parameter, values: Tensor, device: torch.device | str
) -> None:
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(values)
    elif parameter.is_meta:
        owner, _, leaf = name.rpartition(".")
        loaded = nn.Parameter(values.to(device, parameter.dtype, copy=True), parameter.requires_grad)
        setattr(model.get_submodule(owner), leaf, loaded)
    else:
        parameter.copy_(values)


def save_weights(
    folder: Path | str,
    config: WanConfig,
    state: Mapping[str, Tensor],
    *,
    layout: str = DIFFUSERS,
    dtype: torch.dtype | None = None,
    prefix: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[Path]:
    """Write safetensors and `config.json`; returns the files of tensors. Needs memory for one tensor.

    Args:
        state: name in `WanModel` -> values. A lazy mapping is asked for one tensor at a time.
        dtype: of the files; None keeps each tensor's own.
        prefix: set before each name, such as `model.diffusion_model.`.

    Raises:
        ConfigError: an unknown layout. DataError: names that are not the model's, values that are not finite,
            a disk that is full or read-only.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"layout={layout!r}", fix=f"choose one of {', '.join(LAYOUTS)}")
    _check_state(config, state)
    stored: Callable[[str], str] = to_diffusers if layout == DIFFUSERS else _unchanged
    name_of = {prefix + stored(name): name for name in state}
    entries = [
        Entry(new, dtype or state[name].dtype, tuple(state[name].shape)) for new, name in name_of.items()
    ]

    def fetch(name: str) -> Tensor:
        values = state[name_of[name]].detach()
        whole = values.full_tensor() if isinstance(values, DTensor) else values
        if not bool(torch.isfinite(whole).all()):
            raise DataError(
                f"tensor {name_of[name]!r} holds values that are not finite", fix="export an earlier step"
            )
        return whole

    files = write_sharded(Path(folder), entries, fetch, max_shard_bytes)
    write_text(Path(folder) / "config.json", json.dumps(config_entries(config, layout), indent=2))
    return files


def _check_state(config: WanConfig, state: Mapping[str, Tensor]) -> None:
    from zellige_lightning.recipes.wan21.model import WanModel

    with torch.device("meta"):
        wanted = {name: tuple(p.shape) for name, p in WanModel(config).named_parameters()}
    found = {name: tuple(values.shape) for name, values in state.items()}
    if wrong := sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name)):
        first = wrong[0]
        raise DataError(
            f"{len(wrong)} tensors are not those of the model, first {first!r}: {found.get(first)} given,"
            f" {wanted.get(first)} in the model",
            fix="name the model size that these weights were trained with",
        )


def config_of_state(shapes: Mapping[str, tuple[int, ...]], num_heads: int | None = None) -> WanConfig:
    """Sizes from the shapes of a `WanModel`'s tensors. Heads leave no trace in them: they are those of a
    known size, or must be told.

    Raises:
        ConfigError: the number of heads is not known. DataError: a tensor is missing.
    """
    try:
        dim, in_dim = shapes["patch_embedding.weight"][:2]
        sizes = {
            "dim": dim,
            "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
            "num_layers": len({name.split(".")[1] for name in shapes if name.startswith("blocks.")}),
            "text_dim": shapes["text_embedding.0.weight"][1],
            "freq_dim": shapes["time_embedding.0.weight"][1],
            "in_dim": in_dim,
            "out_dim": shapes["head.head.weight"][0] // 4,
        }
    except KeyError as error:
        raise DataError(
            f"tensor {error} of the model is missing", fix="export a checkpoint of WanModule"
        ) from error
    for known in CONFIGS.values():
        if all(getattr(known, name) == size for name, size in sizes.items()):
            return known
    if num_heads is None:
        raise ConfigError(
            f"a model of width {dim} has no known number of heads",
            fix="add --num-heads <the trained model's>",
        )
    return WanConfig(num_heads=num_heads, **sizes)
