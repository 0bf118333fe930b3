"""The worker of gpu_check with units that fail in every way."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_worker


def good(setup: Any) -> None:
    setup.record({"value": 1})


def raises(setup: Any) -> None:
    setup.record({"value": 2})
    raise ValueError("no such thing in /some/folder/of/mine/file.py")


def dies(setup: Any) -> None:
    print("illegal memory access", flush=True)
    os._exit(139)


def hangs(setup: Any) -> None:
    setup.record({"value": 3})
    time.sleep(600)


def absent(setup: Any) -> None:
    from gpu_common import AbsentError

    raise AbsentError("not installed")


if __name__ == "__main__":
    gpu_worker.HOME = {
        name: ("__main__", name) for name in ("good", "raises", "dies", "hangs", "absent", "last")
    } | {"last": ("__main__", "good")}
    sys.exit(gpu_worker.main())
