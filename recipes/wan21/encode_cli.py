"""`zellige-encode`: latents and text embeddings of a data set, in a folder that training reads."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zellige_lightning.errors import DataError, ZelligeError
from zellige_lightning.recipes.wan21.buckets import BucketRules
from zellige_lightning.recipes.wan21.codec import LatentCodec
from zellige_lightning.recipes.wan21.decision import Decision, check_unreadable, skipped, summary
from zellige_lightning.recipes.wan21.decoder import Decoder
from zellige_lightning.recipes.wan21.encode_job import SHARD_BYTES, EncodeJob
from zellige_lightning.recipes.wan21.media_options import add_media_options, caps_of, listing_of, rules_of
from zellige_lightning.recipes.wan21.ranks import Rank, find_rank
from zellige_lightning.recipes.wan21.tensor_files import check_writable
from zellige_lightning.recipes.wan21.text import TextEncoder
from zellige_lightning.recipes.wan21.umt5 import load_text_encoder
from zellige_lightning.recipes.wan21.vae import load_codec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_REPORT_EVERY_S = 30.0


def store_settings(codec: LatentCodec, text: TextEncoder, rules: BucketRules) -> dict[str, Any]:
    """All that a sample depends on besides its medium and caption."""
    shape = {"text_len": text.text_len, "text_dim": text.text_dim}
    return {**codec.settings, **text.settings, **shape, "buckets": rules.settings}


def encode(args: argparse.Namespace) -> list[Decision] | None:
    """Encode this rank's share of what is missing.

    Returns:
        The decisions on all entries, or None while other ranks are at work.

    Raises:
        ConfigError, DataError: see `zellige-encode --help` and docs/DATA.md.
    """
    rank, rules, listing = find_rank(args.rank, args.world_size), rules_of(args), listing_of(args)
    check_writable(args.output)  # before the minutes that loading a text encoder takes
    device = _device(args.device, rank)
    text_dtype = args.text_dtype or ("float32" if device.type == "cpu" else "bfloat16")
    codec = load_codec(args.vae, device, _DTYPES[args.vae_dtype])
    text = load_text_encoder(args.text, device, _DTYPES[text_dtype], args.text_len)
    settings = store_settings(codec, text, rules)
    job = EncodeJob(args.output, listing.items, settings, rank, shard_bytes=args.shard_mib << 20)
    print(f"{_who(rank)}{len(job.share)} media, {len(job.missing)} of them to encode", flush=True)
    _encode_missing(job, codec, text, args, rules)
    return job.finish(skipped(skip) for skip in listing.skipped)


def _encode_missing(
    job: EncodeJob, codec: LatentCodec, text: TextEncoder, args: argparse.Namespace, rules: BucketRules
) -> None:
    if not job.missing:
        return
    unusable: list[Decision] = []
    told = began = time.monotonic()
    workers = min(args.workers, len(job.missing))
    with Decoder(workers, rules, caps_of(args), pixels=True) as decoder:
        for count, done in enumerate(decoder.run(job.missing), start=1):
            if done.pixels is not None and done.sha256 is not None:
                latents = _latents(codec, done.pixels, done.decision)
                job.add(done.item, done.decision, done.sha256, latents, text.encode(done.item.caption))
            else:
                job.skip(done.decision)
                unusable.append(done.decision)
                check_unreadable(unusable, len(job.share), args.max_unreadable)
            if not args.quiet:
                print(done.decision.line(), flush=True)
            if time.monotonic() - told > _REPORT_EVERY_S:
                told = time.monotonic()
                rate = count / (told - began)
                left = (len(job.missing) - count) / rate
                print(
                    f"{_who(job.rank)}{count} of {len(job.missing)}, {rate:.2f}/s, {left:.0f} s left",
                    flush=True,
                )


def _latents(codec: LatentCodec, pixels: Tensor, decision: Decision) -> Tensor:
    try:
        return codec.encode(pixels)
    except torch.OutOfMemoryError as error:
        raise DataError(
            f"{decision.name!r} in bucket {decision.bucket} does not fit into the memory of the GPU",
            fix="choose smaller --resolutions, --vae-dtype bfloat16, or a larger GPU; the rest is kept",
        ) from error


def _device(name: str | None, rank: Rank) -> torch.device:
    if name is not None:
        return torch.device(name)
    return torch.device("cuda", rank.local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _who(rank: Rank) -> str:
    return f"rank {rank.rank} of {rank.world_size}: " if rank.world_size > 1 else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("zellige-encode", description=__doc__)
    add_media_options(parser)
    add = parser.add_argument
    add(
        "--output", type=Path, required=True, help="folder of the encoded samples; a second run goes on in it"
    )
    add(
        "--vae", default="demo", help="demo, a folder, or a hub name such as Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    )
    add("--text", default="demo", help="demo, a folder with text_encoder and tokenizer, or a hub name")
    add("--text-len", type=int, help="rows of a caption's embedding; default 512, with the demo's encoder 16")
    add("--vae-dtype", choices=_DTYPES, default="float32", help="precision of the VAE")
    add("--text-dtype", choices=_DTYPES, help="precision of UMT5; default bfloat16, on a CPU float32")
    add("--device", help="default: this rank's GPU, or the CPU")
    add("--rank", type=int, help="of this process; default: what torchrun or srun says")
    add("--world-size", type=int, help="number of processes")
    add("--shard-mib", type=int, default=SHARD_BYTES >> 20, help="size of a file of samples")
    return parser


def main(arguments: Rows[str] | None = None) -> None:
    """Entry point of `zellige-encode`."""
    args = _parser().parse_args(arguments)
    try:
        decisions = encode(args)
    except ZelligeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on with what is missing")
    if decisions is None:
        print("this share is done; the last process to finish writes the manifest")
    else:
        print(summary(decisions))


if __name__ == "__main__":
    main()
