"""The Markdown summary of a result of `gpu_check.py`. Needs Python alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
REHEARSAL = (
    "**This is a rehearsal on a CPU with miniature sizes. It shows that the script runs; none of its times,"
    " rates or sizes is a GPU's, and none may be quoted as one.**"
)


def markdown(result: dict[str, Any]) -> str:
    """What was measured, in tables; what was not, and why."""
    machine, units = result["machine"], result["units"]
    title = f"# GPU check: {machine['gpu']}" if result["is_gpu"] else "# CPU rehearsal of the GPU check"
    notes = [] if result["is_gpu"] else [REHEARSAL]
    if result["is_gpu"] and result["tiny"]:
        notes.append("**Miniature sizes: a rehearsal, no figures.**")
    parts = [title, *notes, _machine(machine), _units(units)]
    parts += [_kernels(units), _throughput(units), _prices(units), _step(units, machine)]
    parts += [_diffusers(units), _compile(units)]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(columns: Sequence[tuple[str, str]], rows: Sequence[Row]) -> str:
    """Columns are (heading, key); a missing value is a dash."""
    lines = ["| " + " | ".join(heading for heading, _ in columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = (str(row.get(key, "-")).replace("|", "/").replace("\n", " ") for _, key in columns)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _machine(machine: Row) -> str:
    names = ("date", "gpu", "capability", "memory_gib", "driver", "cuda", "torch", "python", "cores")
    return ", ".join(f"{name.replace('_', ' ')} {machine[name]}" for name in names if name in machine)


def _units(units: dict[str, Row]) -> str:
    rows = [{"unit": name, **unit} for name, unit in units.items()]
    columns = (("unit", "unit"), ("status", "status"), ("s", "seconds"), ("why", "error"))
    return "## Units\n\n" + table(columns, rows)


def _rows(units: dict[str, Row], unit: str, key: str) -> list[Row]:
    return [row for row in units[unit]["rows"] if key in row]


def _kernels(units: dict[str, Row]) -> str:
    """A line per kernel; each wrong case by itself."""
    summary, wrong = [], []
    for name in (name for name in units if name.startswith("kernel-")):
        cases, repeatability = _rows(units, name, "case"), _rows(units, name, "repeatability")
        if not cases:
            continue
        wrong += [row for row in cases if not row["right"]]
        summary.append(
            {
                "kernel": name.removeprefix("kernel-"),
                "right": f"{sum(row['right'] for row in cases)} of {len(cases)}",
                "worst": _worst([v for row in cases for v in row["error_over_dense_error"].values()]),
                "lse": _worst([row["lse_error"] for row in cases if "lse_error" in row]),
                "default": _agreement(repeatability, "by_default"),
                "deterministic": _agreement(repeatability, "deterministic_mode"),
            }
        )
    if not summary:
        return ""
    columns = (
        ("kernel", "kernel"),
        ("cases right", "right"),
        ("worst error / dense error (limit 2)", "worst"),
        ("worst lse error", "lse"),
        ("two runs, by default", "default"),
        ("two runs, deterministic mode", "deterministic"),
    )
    keys = (
        "kernel",
        "case",
        "head_dim",
        "dtype",
        "error_over_dense_error",
        "lse_layout",
        "lse_error",
        "refused",
    )
    failures = "\n\nWrong:\n\n" + table([(key, key) for key in keys], wrong) if wrong else ""
    return "## Kernels against the fp64 oracle\n\n" + table(columns, summary) + failures


def _worst(values: list[Any]) -> Any:
    return "not finite" if None in values else max(values, default="-")


def _agreement(rows: list[Row], key: str) -> str:
    return ", ".join(dict.fromkeys(row[key] for row in rows)) or "-"


def _throughput(units: dict[str, Row]) -> str:
    ceilings, rows = _rows(units, "throughput", "ceilings"), _rows(units, "throughput", "attention")
    if not ceilings:
        return ""
    text = (
        f"Measured ceilings: bf16 matrix product {ceilings[0]['matmul_tflops']} TFLOP/s,"
        f" copy {ceilings[0]['copy_gb_per_s']} GB/s."
    )
    keys = ("attention", "pack", "tokens", "segments", "kernel_name", "repeats")
    columns = [(key, key) for key in keys] + [
        ("kernel ms", "kernel_ms"),
        ("ours ms", "ours_ms"),
        ("plain SDPA ms", "plain_sdpa_ms"),
        ("overhead %", "overhead_pct"),
        ("ours TFLOP/s", "ours_tflops"),
        ("forward overhead %", "forward_overhead_pct"),
    ]
    return f"## Engine against the bare kernel (forward and backward)\n\n{text}\n\n" + table(columns, rows)


def _prices(units: dict[str, Row]) -> str:
    rows = _rows(units, "prices", "bucket")
    keys = ("bucket", "tokens", "copies", "repeats", "ms", "tflops", "peak_gib", "left_out")
    heading = "## One layer, whole sequences (ms per sequence; forward, recomputation, backward)\n\n"
    return heading + table([(key, key) for key in keys], rows) if rows else ""


def _step(units: dict[str, Row], machine: Row) -> str:
    rows = [dict(row) for row in _rows(units, "step", "mix")]
    geometry, ceilings = _rows(units, "step", "precision"), _rows(units, "throughput", "ceilings")
    for row in (row for row in rows if "model_tflops" in row):
        if machine.get("datasheet_tflops"):
            row["mfu"] = f"{100 * row['model_tflops'] / machine['datasheet_tflops']:.1f} %"
        if ceilings:
            row["of_product"] = f"{100 * row['executed_tflops'] / ceilings[0]['matmul_tflops']:.1f} %"
    if not rows:
        return ""
    columns = [(key, key) for key in ("mix", "tokens", "repeats", "step_ms", "noise_ms", "model_tflops")] + [
        ("MFU (3F over datasheet)", "mfu"),
        ("executed over measured product", "of_product"),
        ("peak MiB", "peak_mib"),
        ("memory model MiB", "predicted_mib"),
        ("left out", "left_out"),
    ]
    text = f"Precision {geometry[0]['precision']}." if geometry else ""
    return f"## Training step of the whole model\n\n{text}\n\n" + table(columns, rows)


def _diffusers(units: dict[str, Row]) -> str:
    rows = _rows(units, "diffusers", "workload")
    keys = (
        "workload",
        "tokens",
        "sequences",
        "repeats",
        "ours_ms",
        "diffusers_ms",
        "diffusers_calls",
        "speedup",
    )
    same = "".join(
        f"Deviation: outputs {row['out_deviation']}, input gradients {row['gradient_deviation']}.\n\n"
        for row in _rows(units, "diffusers", "comparison")
    )
    return "## The same layer in diffusers\n\n" + same + table([(k, k) for k in keys], rows) if rows else ""


def _compile(units: dict[str, Row]) -> str:
    rows, timed = _rows(units, "compile", "plan"), _rows(units, "compile", "eager_ms")
    keys = ("plan", "tokens", "segments", "backend", "graphs", "first_run_s", "deviation_from_eager")
    text = "".join(
        f"\n\n{row['timed_tokens']} tokens: eager {row['eager_ms']} ms, compiled {row['compiled_ms']} ms."
        for row in timed
    )
    return "## torch.compile of a layer\n\n" + table([(k, k) for k in keys], rows) + text if rows else ""
