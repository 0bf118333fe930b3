"""Runs units of `gpu_check.py` one after another, and writes what happens as JSON lines.

    gpu_worker.py '[["throughput", 45.0], ...]' LOG cuda|cpu TINY UNTIL

The process ends at the first error: after one, a CUDA context may be unusable, and memory is held by frames.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

# Unit -> (module, function). Imported when it is the unit's turn: a missing package costs one unit.
HOME = {
    "machine": ("gpu_common", "describe_machine"),
    "throughput": ("gpu_throughput", "check"),
    "prices": ("gpu_prices", "check"),
    "step": ("gpu_step", "check"),
    "diffusers": ("gpu_diffusers", "check"),
    "compile": ("gpu_compile", "check"),
}


class Log:
    """Lines that the supervising process reads while they are written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, unit: str, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"unit": unit, "event": event, **values}) + "\n")
        self._file.flush()


def run_unit(name: str, limit_s: float, log: Log, device: str, tiny: bool, until: float) -> bool:
    """Whether the process may go on."""
    began = time.time()
    status, error = "ok", ""
    try:
        from gpu_common import AbsentError, Setup

        module, function = HOME.get(name, ("gpu_kernels", "check"))
        check = getattr(importlib.import_module(module), function)
        deadline = time.monotonic() + min(limit_s, until - began)
        setup = Setup(name, device, tiny, deadline, lambda row: log.write(name, "row", row=row))
        try:
            check(setup)
        except AbsentError as reason:
            status, error = "absent", str(reason)
    except Exception as problem:
        lines = traceback.format_exception_only(type(problem), problem)
        where = traceback.extract_tb(problem.__traceback__)[-1]
        status, error = (
            "error",
            f"{''.join(lines).strip()[:1500]} ({Path(where.filename).name}:{where.lineno})",
        )
    log.write(name, "end", status=status, error=error, seconds=time.time() - began)
    return status != "error"


def main() -> int:
    # PyTorch's deterministic mode asks for it before the first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.path.append(
        str(Path(__file__).resolve().parent.parent)
    )  # a checkout serves where nothing is installed
    plan, path, device, tiny, until = sys.argv[1:6]
    log = Log(Path(path))
    for name, limit_s in json.loads(plan):
        log.write(name, "start")
        if not run_unit(name, limit_s, log, device, bool(int(tiny)), float(until)):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
