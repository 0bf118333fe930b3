"""Captions in files of their own."""

from __future__ import annotations

import json
from pathlib import Path

from zellige_lightning.recipes.wan21.manifest import Listing

CAPTION_SUFFIXES = (".txt", ".json")
CAPTION_FIELDS = ("caption", "text", "prompt")  # of a JSON object; the first that is there
MAX_CAPTION_BYTES = 1 << 20


def read_caption(path: Path, listing: Listing) -> str:
    """The text, or the first known field of a JSON object."""
    if path.stat().st_size > MAX_CAPTION_BYTES:
        listing.skip(path.name, "caption of more than 1 MiB")
        return ""
    return caption_from(path.suffix.lower(), path.read_bytes())


def caption_from(suffix: str, data: bytes) -> str:
    """Caption in the bytes of a .txt or .json; empty if there is none."""
    text = data.decode("utf-8", errors="replace")
    if suffix != ".json":
        return text
    try:
        entries = json.loads(text)
    except ValueError:
        return ""
    if not isinstance(entries, dict):
        return ""
    return next((str(entries[name]) for name in CAPTION_FIELDS if entries.get(name)), "")
