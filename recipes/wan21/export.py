"""`zellige-export`: weights of a Lightning checkpoint as safetensors that other tools load."""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Mapping, Sequence as Rows
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zellige_lightning.errors import ConfigError, DataError, ZelligeError
from zellige_lightning.recipes.wan21.config import CONFIGS, WanConfig, named_config
from zellige_lightning.recipes.wan21.layouts import DIFFUSERS, LAYOUTS
from zellige_lightning.recipes.wan21.weights import MAX_SHARD_BYTES, config_of_state, save_weights
from zellige_lightning.sharded_checkpoint import ShardedTensors, is_sharded, verify

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MODEL = "model."  # where a WanModule keeps its WanModel


def read_checkpoint(path: Path, *, unsafe_pickle: bool = False) -> Mapping[str, Any]:
    """A Lightning checkpoint, its tensors left on disk: they are read when they are used. A folder, as
    `zellige_fsdp2` saves it, has no more than its parameters here.

    Args:
        unsafe_pickle: also unpickle other objects than tensors and plain data, which can run any code.

    Raises:
        DataError: missing, damaged, or with other objects while `unsafe_pickle` is off.
    """
    if is_sharded(path):
        verify(path)
        entries = {name: ShardedTensors(path, name) for name in ("state_dict", "current_model_state")}
        return {name: tensors for name, tensors in entries.items() if tensors}
    if not path.is_file():
        raise DataError(
            f"checkpoint {path.name!r} is {'some other folder' if path.is_dir() else 'no file'}",
            fix="give a .ckpt file, or a folder that strategy=zellige_fsdp2 has saved",
        )
    try:
        checkpoint = torch.load(path, map_location="cpu", mmap=True, weights_only=not unsafe_pickle)
    except pickle.UnpicklingError as error:
        raise DataError(
            f"checkpoint {path.name!r} holds more than tensors and plain data: {str(error).splitlines()[0]}",
            fix="if you wrote it yourself, add --unsafe-pickle, which runs whatever code the file contains",
        ) from error
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        raise DataError(
            f"checkpoint {path.name!r} cannot be read: {error}", fix="use an intact checkpoint"
        ) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise DataError(
            f"{path.name!r} is no Lightning checkpoint: it has no state_dict", fix="give a .ckpt file"
        )
    return checkpoint


def model_state(checkpoint: Mapping[str, Any], *, ema: bool = False) -> dict[str, Tensor]:
    """Name in `WanModel` -> values, of the trained weights or of their running average.

    Lightning's `EMAWeightAveraging` leaves the average in `state_dict` and the trained weights beside it.

    Raises:
        DataError: no running average in the checkpoint, or no weights of a `WanModule`.
    """
    averaged = "current_model_state" in checkpoint
    if ema and not averaged:
        raise DataError(
            "the checkpoint holds no running average of the weights",
            fix="export without --ema, or train with the callback EMAWeightAveraging of Lightning",
        )
    state = checkpoint["current_model_state" if averaged and not ema else "state_dict"]
    found = {name.removeprefix(_MODEL): values for name, values in state.items() if name.startswith(_MODEL)}
    if not found:
        raise DataError(
            "the checkpoint holds no weights of a WanModule", fix="export a run of a wan21 recipe"
        )
    return found


def export(
    checkpoint: Path,
    output: Path,
    *,
    layout: str = DIFFUSERS,
    dtype: torch.dtype | None = None,
    ema: bool = False,
    model: str | None = None,
    num_heads: int | None = None,
    prefix: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    unsafe_pickle: bool = False,
) -> list[Path]:
    """What `zellige-export` does; the arguments are its options. Returns the files of tensors."""
    state = model_state(read_checkpoint(checkpoint, unsafe_pickle=unsafe_pickle), ema=ema)
    config = _config(state, model, num_heads)
    return save_weights(
        output, config, state, layout=layout, dtype=dtype, prefix=prefix, max_shard_bytes=max_shard_bytes
    )


def _config(state: Mapping[str, Tensor], model: str | None, num_heads: int | None) -> WanConfig:
    if model is not None:
        return named_config(model)
    return config_of_state({name: tuple(values.shape) for name, values in state.items()}, num_heads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("zellige-export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a .ckpt file of Lightning, or a folder")
    parser.add_argument("output", type=Path, help="folder for safetensors and config.json")
    parser.add_argument("--layout", choices=LAYOUTS, default=DIFFUSERS, help="names of the tensors")
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="bfloat16", help="type of the values in the files"
    )
    parser.add_argument(
        "--ema", action="store_true", help="the running average instead of the trained weights"
    )
    parser.add_argument("--model", choices=CONFIGS, help="size, where the shapes do not tell it")
    parser.add_argument("--num-heads", type=int, help="attention heads of a size of your own")
    parser.add_argument("--prefix", default="", help="before each name, such as model.diffusion_model.")
    parser.add_argument("--max-shard-gib", type=float, default=5.0, help="largest file")
    parser.add_argument("--unsafe-pickle", action="store_true", help="unpickle any object; may run any code")
    return parser


def main(arguments: Rows[str] | None = None) -> None:
    """Entry point of `zellige-export`."""
    args = _parser().parse_args(arguments)
    try:
        if args.max_shard_gib <= 0.0:
            raise ConfigError(f"--max-shard-gib={args.max_shard_gib}", fix="give a positive size")
        files = export(
            args.checkpoint,
            args.output,
            layout=args.layout,
            dtype=_DTYPES[args.dtype],
            ema=args.ema,
            model=args.model,
            num_heads=args.num_heads,
            prefix=args.prefix,
            max_shard_bytes=int(args.max_shard_gib * 2**30),
            unsafe_pickle=args.unsafe_pickle,
        )
    except ZelligeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print("written:", *(f"  {file}" for file in files), f"  {args.output / 'config.json'}", sep="\n")


if __name__ == "__main__":
    main()
