"""Images and clips from files: RGB, 16 frames per second, the size of a bucket. Every fault is a `DataError`.

Legend: F frames, H, W pixels. Pictures are uint8 `[3, F, H, W]`; an image has F = 1.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.clips import SAMPLE_FPS, decode_clip, nearest
from zellige_lightning.recipes.wan21.pictures import decode_image, fit

__all__ = ["SAMPLE_FPS", "decode_clip", "decode_image", "find_media", "fit", "nearest"]


def find_media(package: str, name: str) -> Path:
    """Path of a data file inside an installed package, found without importing the package.

    Raises:
        DataError: the package or the file is not there.
    """
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise DataError(
            f"package {package!r} is not installed", fix="install the extra `demo` of this package"
        )
    path = Path(folders[0]) / name
    if not path.is_file():
        raise DataError(
            f"package {package!r} has no file {name!r}",
            fix="install the release that the extra `demo` asks for",
        )
    return path
