"""One switch for the search kernels: compiled by numba where it can be imported, plain Python where not.

Kernels are written for flat buffers of integers that only need indexing, so that the same code runs on int64
arrays and on lists, and gives the same answers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

numba: Any = None
if os.environ.get("NUMBA_DISABLE_JIT") != "1":
    with suppress(ImportError):
        numba = import_module("numba")

HAS_NUMBA = numba is not None


def compiled(kernel: Kernel) -> Kernel:
    """`nogil`, so that planning in a background thread never stalls the training thread. The compiled code is
    kept on disk where the package folder or numba's cache folder is writable; else each process compiles."""
    if numba is None:
        return kernel
    fast: Kernel
    try:
        fast = numba.njit(nogil=True, cache=True)(kernel)
        _tolerate_full_disks(fast)
    except RuntimeError:  # no writable cache folder
        fast = numba.njit(nogil=True)(kernel)
    return fast


def _tolerate_full_disks(kernel: Any) -> None:
    """A cache file that cannot be read or written costs a compilation, not the step that needs the kernel."""
    cache = kernel._cache
    load, save = cache.load_overload, cache.save_overload

    def load_or_compile(*arguments: Any) -> Any:
        with suppress(OSError, EOFError):
            return load(*arguments)
        return None

    def save_or_forget(*arguments: Any) -> None:
        with suppress(OSError):
            save(*arguments)

    cache.load_overload, cache.save_overload = load_or_compile, save_or_forget


def buffer(values: Iterable[int]) -> Any:
    """A flat buffer of integers: an int64 array for compiled kernels, else a list."""
    return np.array(list(values), dtype=np.int64) if HAS_NUMBA else list(values)


def zeros(length: int) -> Any:
    return np.zeros(length, dtype=np.int64) if HAS_NUMBA else [0] * length


def as_list(values: Any) -> list[int]:
    """A buffer as a list of plain integers."""
    return values.tolist() if HAS_NUMBA else list(values)
