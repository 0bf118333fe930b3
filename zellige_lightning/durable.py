"""Files that are there whole or not at all, also after a full disk or a machine that stops."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from zellige_lightning.errors import DataError


def atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file beside its place, and put it there once it is on the disk.

    Raises:
        DataError: the disk is full or read-only. What was at `path` before is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:
        refused = error if isinstance(error, OSError) else error.__context__  # torch.save hides it
        if not isinstance(refused, OSError):
            raise
        raise DataError(
            f"{path.name!r} cannot be written in {path.parent.name!r}: {refused.strerror or refused}",
            fix="free some space, or choose a folder that can be written; what was written before is kept",
        ) from error
    finally:
        with suppress(OSError):  # it never came to be
            temporary.unlink()
