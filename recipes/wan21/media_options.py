"""The options that `zellige-inspect` and `zellige-encode` share: what to read, and what to bring it to."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from zellige_lightning.errors import ConfigError
from zellige_lightning.recipes.wan21.buckets import BucketRules, load_rules
from zellige_lightning.recipes.wan21.folders import collect
from zellige_lightning.recipes.wan21.manifest import Listing
from zellige_lightning.recipes.wan21.probe import Caps
from zellige_lightning.recipes.wan21.tables import PRESETS, Columns, preset


def add_media_options(parser: argparse.ArgumentParser) -> None:
    """Adds them to a command."""
    caps = Caps()
    add = parser.add_argument
    add("sources", nargs="+", type=Path, help="folders, tables (.csv .json .jsonl .parquet), webdataset tars")
    add("--preset", choices=PRESETS, help="columns of a table; default: the preset that fits")
    add("--media-column", action="append", help="column of file names in a table of your own (repeatable)")
    add("--caption-column", help="column of captions in a table of your own")
    add("--media-root", type=Path, help="what paths in a table are relative to; default: the table's folder")
    add("--missing-caption", choices=("skip", "empty"), default="skip", help="media without caption")
    add("--buckets", default="wan21", help="name in conf/data/buckets, or a .yaml file")
    add("--resolutions", help="only these of the buckets' resolutions, such as 256p,480p")
    add("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes that decode")
    add("--max-pixels", type=int, default=caps.max_pixels, help="of one picture")
    add("--max-frames", type=int, default=caps.max_frames, help="pictures in one file")
    add("--max-bytes", type=int, default=caps.max_bytes, help="of one file")
    add("--max-seconds", type=float, default=caps.max_seconds, help="to decode one file")
    add("--max-unreadable", type=float, default=0.01, help="share of unreadable media that is tolerated")
    add("--quiet", action="store_true", help="no line for each file")


def listing_of(args: argparse.Namespace) -> Listing:
    """What the sources list. Raises: ConfigError, DataError."""
    if not 0.0 <= args.max_unreadable <= 1.0:
        raise ConfigError(f"--max-unreadable={args.max_unreadable}", fix="give a share between 0 and 1")
    return collect(
        args.sources,
        columns=_columns(args),
        media_root=args.media_root,
        missing_caption=args.missing_caption,
    )


def _columns(args: argparse.Namespace) -> Columns | None:
    own = args.media_column, args.caption_column
    if any(own):
        if args.preset or not all(own):
            raise ConfigError(
                "--media-column and --caption-column go together, without --preset",
                fix="give both, or a preset",
            )
        return Columns(tuple(args.media_column), args.caption_column)
    return preset(args.preset) if args.preset else None


def rules_of(args: argparse.Namespace) -> BucketRules:
    """Raises: ConfigError."""
    rules = load_rules(args.buckets)
    return rules.only(args.resolutions.split(",")) if args.resolutions else rules


def caps_of(args: argparse.Namespace) -> Caps:
    """Raises: ConfigError."""
    return Caps(args.max_pixels, args.max_frames, args.max_bytes, args.max_seconds)
