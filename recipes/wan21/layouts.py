"""The two layouts of Wan2.1 weights: names of tensors and configuration files of each.

`original` is what the authors publish, with the names that `WanModel` uses; `diffusers` is what
`WanTransformer3DModel` of diffusers reads and writes. The values are the same in both, tensor by tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.recipes.wan21.config import WanConfig

ORIGINAL, DIFFUSERS = "original", "diffusers"
LAYOUTS = (ORIGINAL, DIFFUSERS)
# Whole models are published under a prefix (ComfyUI, DiffSynth-Studio, a LightningModule that holds `model`).
PREFIXES = ("model.diffusion_model.", "pipe.dit.", "diffusion_model.", "model.", "transformer.")
# Other models that share a file with a prefixed one.
_NEIGHBOURS = ("vae.", "first_stage_model.", "cond_stage_model.", "text_encoders.", "text_encoder.")

# Stem of a tensor's name, original -> diffusers. The second and third norm of a block change places.
_OUTER = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}
_IN_BLOCK = {
    "modulation": "scale_shift_table",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    **{f"self_attn.{ours}": f"attn1.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{f"cross_attn.{ours}": f"attn2.{theirs}" for ours, theirs in _ATTENTION.items()},
}
_BLOCK = re.compile(r"(blocks\.\d+)\.(.+)")


def to_diffusers(name: str) -> str:
    """Raises `DataError` for a name that the original layout does not have."""
    return _renamed(name, _OUTER, _IN_BLOCK, ORIGINAL)


def to_original(name: str) -> str:
    """Raises `DataError` for a name that the diffusers layout does not have."""
    return _renamed(name, _inverse(_OUTER), _inverse(_IN_BLOCK), DIFFUSERS)


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in names.items()}


def _renamed(name: str, outer: Mapping[str, str], in_block: Mapping[str, str], layout: str) -> str:
    block = _BLOCK.fullmatch(name)
    prefix, rest, names = (f"{block[1]}.", block[2], in_block) if block else ("", name, outer)
    if rest in names:  # a parameter by itself: a modulation
        return prefix + names[rest]
    stem, _, kind = rest.rpartition(".")
    if stem not in names or kind not in ("weight", "bias"):
        raise DataError(
            f"Wan2.1 has no tensor {name!r} in the {layout} layout",
            fix="only text-to-video models of Wan2.1 can be read: image-to-video models have further tensors",
        )
    return f"{prefix}{names[stem]}.{kind}"


def common_prefix(names: Iterable[str]) -> str:
    """The known prefix that the tensors of the transformer have in this file; empty if none."""
    names = list(names)
    for prefix in PREFIXES:
        inside = [name for name in names if name.startswith(prefix)]
        others = [name for name in names if not name.startswith((prefix, *_NEIGHBOURS))]
        if inside and not others:
            return prefix
    return ""


def layout_of(names: Iterable[str]) -> str:
    """By its names without prefix. Raises: DataError if they are of neither layout."""
    found = set(names)
    if any(name.startswith("condition_embedder.") for name in found):
        return DIFFUSERS
    if any(name.startswith("time_embedding.") for name in found):
        return ORIGINAL
    raise DataError(
        f"these are no weights of Wan2.1: the first names are {sorted(found)[:3]}",
        fix="give a folder or file with the transformer's safetensors, not those of the VAE or text encoder",
    )


def config_entries(config: WanConfig, layout: str) -> dict[str, Any]:
    """Content of the layout's `config.json`."""
    if layout == ORIGINAL:
        names = (
            "dim",
            "ffn_dim",
            "freq_dim",
            "in_dim",
            "num_heads",
            "num_layers",
            "out_dim",
            "text_len",
            "eps",
        )
        entries = {name: getattr(config, name) for name in (*names, "text_dim")}
        return {"_class_name": "WanModel", "model_type": "t2v", **entries}
    return {
        "_class_name": "WanTransformer3DModel",
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "in_channels": config.in_dim,
        "out_channels": config.out_dim,
        "num_layers": config.num_layers,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "patch_size": list(config.patch_size),
        "rope_max_seq_len": 1024,
        **{name: getattr(config, name) for name in ("ffn_dim", "freq_dim", "text_dim", "eps")},
    }


def config_from_entries(entries: Mapping[str, Any]) -> WanConfig:
    """Sizes from a `config.json` of either layout; absent sizes keep their defaults.

    Raises:
        ConfigError: it lacks a size, or describes a model that is not text-to-video Wan2.1.
    """
    if entries.get("model_type", "t2v") != "t2v" or entries.get("image_dim") is not None:
        raise ConfigError(
            "the weights are of an image-to-video model", fix="use a text-to-video model of Wan2.1"
        )
    renamed = dict(entries)
    if "attention_head_dim" in entries:
        heads = entries.get("num_attention_heads", 40)
        renamed |= {"num_heads": heads, "dim": heads * entries["attention_head_dim"]}
        renamed |= {"in_dim": entries.get("in_channels", 16), "out_dim": entries.get("out_channels", 16)}
    known = WanConfig.__dataclass_fields__
    try:
        return WanConfig(**{name: value for name, value in renamed.items() if name in known})
    except TypeError as error:
        raise ConfigError(f"config.json lacks sizes of the model: {error}", fix="restore the file") from error
