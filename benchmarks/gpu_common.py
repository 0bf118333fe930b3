"""What all units of `gpu_check.py` share: their setting, the machine, timing and memory."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

import torch
from torch import Tensor

from zellige_lightning.recipes.wan21.config import WanConfig, named_config

# Dense bf16 of the datasheets, by the name that the driver gives. A GPU that is not here gets its figures
# against the measured matrix product alone.
DATASHEET_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA A800-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA RTX A6000": 155.0,
}


class AbsentError(Exception):
    """What a unit checks does not exist here; no failure."""


@dataclass(frozen=True)
class Setup:
    """How a unit runs.

    Args:
        unit: its name. device_name: `cuda` or `cpu`. tiny: sizes of a rehearsal.
        deadline: of `time.monotonic()`; a unit starts nothing that would end later.
        record: keeps a row, also if the unit fails later.
    """

    unit: str
    device_name: str
    tiny: bool
    deadline: float
    record: Callable[[dict[str, Any]], None]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")

    @property
    def is_gpu(self) -> bool:
        return self.device_name == "cuda"

    @property
    def remaining_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def config(self) -> WanConfig:
        """The model: Wan2.1-1.3B, or the smallest one."""
        return named_config("tiny" if self.tiny else "wan21_1_3b")

    @property
    def model_name(self) -> str:
        return "tiny" if self.tiny else "wan21_1_3b"

    @property
    def repeats(self) -> int:
        return 2 if self.tiny else 5


def describe_machine(setup: Setup) -> None:
    """What a reader needs to judge a figure; nothing that names this machine."""
    if setup.is_gpu and not torch.cuda.is_available():
        raise RuntimeError(
            "this PyTorch sees no CUDA device; `--device cpu --tiny` rehearses the check without one"
        )
    row: dict[str, Any] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
    }
    if setup.is_gpu:
        properties = torch.cuda.get_device_properties(setup.device)
        row |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "driver": driver_version(),
            "datasheet_tflops": DATASHEET_TFLOPS.get(properties.name),
        }
    setup.record(row)


def driver_version() -> str:
    """Of the kernel module; unknown in a container that hides it."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            words = file.readline().split()
    except OSError:
        words = []
    numbers = [w for w in words if w.count(".") >= 1 and w.replace(".", "").isdigit()]
    if numbers:
        return numbers[0]
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # the package is absent or the library cannot be opened: only a label is lost
        return "unknown"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed_ms(run: Callable[[], Any], device: torch.device) -> float:
    """Of one call, between events on the GPU: includes the time in which the GPU waits for the host."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - began)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end)


def medians_ms(
    variants: Mapping[str, Callable[[], Any]], device: torch.device, repeats: int
) -> dict[str, float]:
    """Median of each variant after a warm-up; variants take turns, so that drift meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            took = elapsed_ms(run, device)
            times[name] += [took] if repeat else []
    return {name: statistics.median(values) for name, values in times.items()}


def free_bytes(device: torch.device) -> int:
    """Memory that PyTorch can still hand out: what is free, and what its allocator keeps unused."""
    if device.type != "cuda":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, setup: Setup, seed: int) -> Tensor:
    generator = torch.Generator(setup.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=setup.device, dtype=torch.float32).to(dtype)


def rounded(value: float, digits: int = 4) -> float:
    """To significant digits, as JSON should show it."""
    return float(f"{value:.{digits}g}")
