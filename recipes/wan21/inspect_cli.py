"""`zellige-inspect`: what would become of every file of a data set, before anything is encoded."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence as Rows
from pathlib import Path

from zellige_lightning.errors import ZelligeError
from zellige_lightning.recipes.wan21.decision import Decision, check_unreadable, skipped, summary, to_csv
from zellige_lightning.recipes.wan21.decoder import Decoder
from zellige_lightning.recipes.wan21.media_options import add_media_options, caps_of, listing_of, rules_of
from zellige_lightning.recipes.wan21.tensor_files import write_text


def inspect(args: argparse.Namespace) -> list[Decision]:
    """The decision on every entry, in the order of keys; what the listing leaves out comes last.

    Raises:
        ConfigError, DataError: options or sources that make no sense.
    """
    listing = listing_of(args)
    with Decoder(
        min(args.workers, len(listing.items)), rules_of(args), caps_of(args), pixels=False
    ) as decoder:
        decisions = [done.decision for done in decoder.run(listing.items)]
    return sorted(decisions, key=lambda d: d.key) + [skipped(skip) for skip in listing.skipped]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("zellige-inspect", description=__doc__)
    add_media_options(parser)
    parser.add_argument("--table", type=Path, help="also write the decisions to this .csv file")
    return parser


def main(arguments: Rows[str] | None = None) -> None:
    """Entry point of `zellige-inspect`. Ends with code 1 if too many media cannot be read or none is kept."""
    args = _parser().parse_args(arguments)
    try:
        decisions = inspect(args)
        if not args.quiet:
            print(*(decision.line() for decision in decisions), "", sep="\n")
        print(summary(decisions))
        if args.table:
            write_text(args.table, to_csv(decisions))
        check_unreadable(decisions, sum(bool(d.key) for d in decisions), args.max_unreadable)
    except ZelligeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if not any(decision.kept for decision in decisions):
        sys.exit(
            "DataError: no medium is kept\n  What to change: see the reasons above, or choose other --buckets"
        )


if __name__ == "__main__":
    main()
