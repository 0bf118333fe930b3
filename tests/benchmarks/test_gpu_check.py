"""The check for a GPU runs on a CPU, notices wrong kernels, and outlives units that fail."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import gpu_check
import gpu_kernels
import gpu_report
import pytest
import torch
import torch.nn.functional as F
from gpu_common import AbsentError, Setup
from gpu_reference import dense_attention
from torch import Tensor

from tests.engine.stand_ins import EfficientBackward, EfficientForward
from zellige_lightning.engine.kernel_choice import BY_NAME
from zellige_lightning.engine.kernels_portable import MathKernel
from zellige_lightning.planner import ProfileTable
from zellige_lightning.recipes.wan21.config import named_config
from zellige_lightning.recipes.wan21.flops import executed_flops, forward_flops, layer_flops

SCRIPT = Path(gpu_check.__file__)


def run_script(folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done.returncode, done.stdout, done.stderr


def written(folder: Path) -> tuple[dict[str, Any], str]:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


def test_a_rehearsal_measures_and_says_what_it_is(tmp_path: Path) -> None:
    units = "kernel-torch_varlen,kernel-cpu_flash,throughput,prices,step"
    code, out, err = run_script(tmp_path, "--device", "cpu", "--tiny", "--units", units)
    assert code == 0, err + out
    result, summary = written(tmp_path)
    assert {n: u["status"] for n, u in result["units"].items() if u["status"] != "not run"} == {
        "machine": "ok",
        "kernel-torch_varlen": "absent",
        "kernel-cpu_flash": "ok",
        "throughput": "ok",
        "prices": "ok",
        "step": "ok",
    }
    assert not result["is_gpu"] and "gpu" not in result["machine"]
    assert [path.name.split("_")[0] for path in tmp_path.iterdir()] == ["cpu-rehearsal"] * 2
    assert gpu_report.REHEARSAL in summary
    table = ProfileTable.from_json(json.dumps(result["whole_prices"]))
    assert all(table.whole_us(bucket) >= 1 for bucket in table.buckets)
    assert "cpu" in str(table.fingerprint["device"])
    (step,) = (row for row in result["units"]["step"]["rows"] if "mix" in row)
    assert step["peak_mib"] >= 1 and step["predicted_mib"] >= 1 and step["step_ms"] > 0


@pytest.mark.slow
def test_a_full_rehearsal_ends_within_its_time(tmp_path: Path) -> None:
    code, out, err = run_script(tmp_path, "--device", "cpu", "--tiny")
    assert code == 0, err + out
    result, _ = written(tmp_path)
    units = result["units"]
    assert {unit["status"] for unit in units.values()} == {"ok", "absent"}
    same = next(row for row in units["diffusers"]["rows"] if "comparison" in row)
    assert max(same["out_deviation"], same["gradient_deviation"]) < 0.02
    compiled = [row for row in units["compile"]["rows"] if "plan" in row]
    assert len(compiled) == 3 and compiled[-1]["graphs"] <= 2
    assert max(row["deviation_from_eager"] for row in compiled) < 0.02


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    code, _, err = run_script(tmp_path)
    assert code == 2
    assert "no CUDA device" in err and "--device cpu --tiny" in err
    assert not list(tmp_path.iterdir())


def test_a_unit_that_fails_costs_itself_alone() -> None:
    units = [
        gpu_check.Unit(name, 10.0 if name == "hangs" else 60.0)
        for name in ("good", "raises", "dies", "hangs", "absent", "last")
    ]
    with mock.patch.object(gpu_check, "GRACE_S", 0.5):
        supervisor = gpu_check.Supervisor(
            "cpu", True, 120.0, worker=Path(__file__).with_name("faulty_worker.py")
        )
        outcomes = supervisor.run(units)
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "good": "ok",
        "raises": "error",
        "dies": "error",
        "hangs": "out of time",
        "absent": "absent",
        "last": "ok",
    }
    assert outcomes["raises"].rows == [{"value": 2}]  # what it had found is kept
    assert outcomes["hangs"].rows == [{"value": 3}]
    assert "no such thing" in outcomes["raises"].error
    assert "illegal memory access" in outcomes["dies"].error


def test_the_whole_check_ends_in_time() -> None:
    began = time.monotonic()
    worker = Path(__file__).with_name("faulty_worker.py")
    with mock.patch.object(gpu_check, "GRACE_S", 0.5):
        outcomes = gpu_check.Supervisor("cpu", True, 8.0, worker).run(
            [gpu_check.Unit("hangs", 600.0), gpu_check.Unit("good", 600.0)]
        )
    assert time.monotonic() - began < 14.0
    assert [outcome.status for outcome in outcomes.values()] == ["out of time"] * 2


def test_the_default_ends_within_eight_minutes() -> None:
    assert gpu_check.TOTAL_S + 3 * gpu_check.GRACE_S <= 480


def test_results_show_no_folder() -> None:
    assert gpu_check.without_paths("no such file: /some/folder/of/mine/file.py") == "no such file: file.py"
    assert gpu_check.without_paths("1/2 of 3 bytes/s") == "1/2 of 3 bytes/s"


def test_every_kernel_has_a_unit_and_every_unit_of_a_kernel_a_kernel() -> None:
    units = {unit.name for unit in gpu_check.UNITS if unit.name.startswith("kernel-")}
    activated = {"kernel-fa3", "kernel-fa4"}  # by PyTorch, in place of its own flash attention
    assert units == activated | {f"kernel-{name}" for name in BY_NAME}


@pytest.mark.parametrize(
    ("name", "dtypes"), [("torch_efficient", (16, 32)), ("torch_varlen", None), ("math", (16, 16, 32))]
)
def test_a_kernel_is_checked_in_what_it_takes(
    name: str, dtypes: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU before Ampere: no bf16, and no flash attention."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    setup = Setup(f"kernel-{name}", "cuda", True, 0.0, print)
    if dtypes is None:
        with pytest.raises(AbsentError, match="Ampere"):
            gpu_kernels.check(setup)
    else:
        assert tuple(torch.finfo(dtype).bits for dtype in gpu_kernels.dtypes_of(name, setup)) == dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_memory_efficient_kernel_passes_where_its_operators_do(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check's own cases, empty segments and strided views among them, over stand-ins of the operators."""
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_backward", EfficientBackward())
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", EfficientForward())
    setup = Setup("kernel-torch_efficient", "cpu", True, time.monotonic() + 60, print)
    with gpu_kernels.kernel_named("torch_efficient"):
        for number, case in enumerate(gpu_kernels.cases(tiny=True)):
            assert gpu_kernels.check_case(case, 64, dtype, setup, number)["right"], case.name


class Broken(MathKernel):
    """A kernel with one fault.

    Args:
        fault: of (out, lse), in place of what the kernel returns.
    """

    def __init__(self, fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        self._fault = fault

    def forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        return self._fault(*super().forward(*args))


def halves(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.cat((out[: len(out) // 2], torch.full_like(out[len(out) // 2 :], torch.nan))), lse


@pytest.mark.parametrize(
    ("fault", "right"),
    [
        (lambda out, lse: (out, lse), True),
        (lambda out, lse: (out * 1.02, lse), False),
        (lambda out, lse: (out, lse + 0.01), False),
        (lambda out, lse: (out, lse.transpose(0, 1)), False),
        (lambda out, lse: (out, lse.to(torch.bfloat16)), False),
        (halves, False),
    ],
)
def test_a_wrong_kernel_is_noticed(
    fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], right: bool
) -> None:
    setup = Setup("kernel-math", "cpu", True, time.monotonic() + 60, print)
    case = gpu_kernels.Case("mixed", (5, 40, 7), (5, 40, 7))
    broken = Broken(fault)
    with mock.patch.object(gpu_kernels.kernels, "kernel_for", return_value=broken):
        row = gpu_kernels.check_case(case, 64, torch.bfloat16, setup, 0)
    assert row["right"] is right


def test_the_oracle_is_attention() -> None:
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(n, 3, 8, dtype=torch.float64) for n in (9, 7, 7, 9))
    got = dense_attention((q, k, v, dout), (4, 0, 5), (3, 2, 2), torch.float64)
    for rows, keys in ((slice(0, 4), slice(0, 3)), (slice(4, 9), slice(5, 7))):
        leaves = [x.transpose(0, 1)[None].requires_grad_() for x in (q[rows], k[keys], v[keys])]
        out = F.scaled_dot_product_attention(*leaves)
        gradients = torch.autograd.grad(out, leaves, dout[rows].transpose(0, 1)[None])
        for mine, true in zip(
            (got.out[rows], got.dq[rows], got.dk[keys], got.dv[keys]), (out, *gradients), strict=True
        ):
            torch.testing.assert_close(mine, true[0].transpose(0, 1), rtol=1e-12, atol=1e-13)
        scores = torch.einsum("qhd,khd->qhk", q[rows], k[keys]) * 8**-0.5
        torch.testing.assert_close(got.lse[rows], scores.logsumexp(-1))
    assert not got.dk[3:5].any() and not got.dv[3:5].any()  # keys that no query sees


def test_operations_are_counted_exactly() -> None:
    small, large = named_config("wan21_1_3b"), named_config("wan21_14b")
    assert forward_flops(small, 256) == 830_405_345_280
    assert forward_flops(small, 32_760) == 283_001_787_777_024
    assert forward_flops(large, 256) == 8_477_896_867_840
    # Recomputation adds the blocks once more, and half of their attention.
    attention = 4 * small.dim * 256 * (256 + 512)
    recomputed = small.num_layers * (layer_flops(small, 256) + attention // 2)
    assert executed_flops(small, 256) == 3 * forward_flops(small, 256) + recomputed


def test_the_summary_gives_mfu_of_the_datasheet() -> None:
    def unit(*rows: dict[str, Any]) -> dict[str, Any]:
        return {"status": "ok", "error": "", "seconds": 1.0, "rows": list(rows)}

    units = {u.name: unit() for u in gpu_check.UNITS}
    units["throughput"] = unit({"ceilings": True, "matmul_tflops": 750.0, "copy_gb_per_s": 4000.0})
    units["step"] = unit(
        {"precision": "bf16-mixed"}, {"mix": "1 image", "model_tflops": 300.0, "executed_tflops": 450.0}
    )
    machine = {"gpu": "Some GPU", "date": "2026-01-01", "datasheet_tflops": 1000.0}
    result = {"is_gpu": True, "tiny": False, "machine": machine, "units": units}
    summary = gpu_report.markdown(result)
    assert "30.0 %" in summary and "60.0 %" in summary
    assert gpu_report.REHEARSAL not in summary
    assert gpu_check.file_stem(result) == "gpu-check_some-gpu_2026-01-01"
