"""Everything that one GPU can tell about the engine, in one run of at most 8 minutes and without network:

    python benchmarks/gpu_check.py                        # on the machine with the GPU
    python benchmarks/gpu_check.py --device cpu --tiny    # the same code in miniature, to rehearse it

Writes one JSON file and a Markdown summary of it to `--out`. Units run one after another in a process of
their own with a time limit each. An error, a crash of the GPU's context or a unit out of time costs that unit
alone: what it had recorded is kept, and the next one starts in a fresh process.

This file needs Python alone, so that it can report what goes wrong while the rest is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_report

FORMAT = "zellige-gpu-check-1"
HERE = Path(__file__).resolve().parent
TOTAL_S = 465  # of 480: the rest is for starting and writing
GRACE_S = 5.0  # for the step that runs when a unit's time is up


@dataclass(frozen=True)
class Unit:
    """A part of the check that stands or falls alone."""

    name: str
    limit_s: float


UNITS = (
    Unit("machine", 40),
    Unit("kernel-torch_varlen", 60),
    Unit("kernel-fa3", 35),
    Unit("kernel-fa4", 35),
    Unit("kernel-flash_attn_3", 35),
    Unit("kernel-flash_attn", 35),
    Unit("kernel-torch_efficient", 50),
    Unit("kernel-math", 35),
    Unit("kernel-cpu_flash", 35),
    Unit("throughput", 45),
    Unit("prices", 100),
    Unit("step", 80),
    Unit("diffusers", 45),
    Unit("compile", 100),
)


@dataclass
class Outcome:
    """What a unit came to. `rows` are in the order in which they were recorded."""

    status: str = "not run"
    error: str = ""
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        if event["event"] == "row":
            self.rows.append(event["row"])
        elif event["event"] == "end":
            self.status, self.error, self.seconds = event["status"], event["error"], event["seconds"]


class Supervisor:
    """Runs units in worker processes until all are done or the time is up.

    Args:
        device: `cuda` or `cpu`; tiny: sizes of a rehearsal; total_s: seconds for all units together.
        worker: the script that runs units.
    """

    def __init__(
        self, device: str, tiny: bool, total_s: float, worker: Path = HERE / "gpu_worker.py"
    ) -> None:
        self._device, self._tiny, self._worker = device, tiny, worker
        self._until = time.time() + total_s

    def run(self, units: Sequence[Unit]) -> dict[str, Outcome]:
        outcomes = {unit.name: Outcome() for unit in units}
        waiting = list(units)
        while waiting:
            if time.time() > self._until - GRACE_S:
                for unit in waiting:
                    outcomes[unit.name] = Outcome("out of time", "the whole check was out of time")
                break
            done = self._run_worker(waiting, outcomes)
            waiting = waiting[done:]
            if "machine" in outcomes and outcomes["machine"].status != "ok":
                break  # no device: nothing else can run
        return outcomes

    def _run_worker(self, units: list[Unit], outcomes: dict[str, Outcome]) -> int:
        """Starts a worker on `units`; how many of them it has settled, at least one."""
        with tempfile.TemporaryDirectory() as folder:
            log, errors = Path(folder, "log"), Path(folder, "errors")
            log.touch()
            plan = [[unit.name, unit.limit_s] for unit in units]
            arguments = [json.dumps(plan), str(log), self._device, str(int(self._tiny)), str(self._until)]
            with errors.open("wb") as sink:
                worker = subprocess.Popen(
                    [sys.executable, str(self._worker), *arguments], stdout=sink, stderr=sink
                )
                try:
                    return self._follow(worker, units, log, errors, outcomes)
                finally:
                    worker.kill()
                    worker.wait()

    def _follow(
        self,
        worker: subprocess.Popen[bytes],
        units: list[Unit],
        log: Path,
        errors: Path,
        outcomes: dict[str, Outcome],
    ) -> int:
        done, read, began = 0, 0, time.time()
        while True:
            ended = worker.poll() is not None
            text = log.read_bytes()
            complete = text.rfind(b"\n") + 1
            for line in text[read:complete].splitlines():
                event = json.loads(line)
                outcomes[event["unit"]].take(event)
                if event["event"] == "end":
                    done += 1
                    print(f"  {event['unit']}: {event['status']}, {event['seconds']:.1f} s", flush=True)
                if event["event"] != "row":
                    began = time.time()
            read = complete
            if done == len(units):
                return done
            if ended:
                return self._lost(units, done, errors, outcomes)
            # Units watch their own deadline; this catches one that hangs.
            if time.time() - began > min(units[done].limit_s, self._until - began) + GRACE_S:
                outcome = outcomes[units[done].name]
                outcome.status = "out of time"
                outcome.error, outcome.seconds = "stopped at its time limit", time.time() - began
                print(f"  {units[done].name}: out of time", flush=True)
                return done + 1
            time.sleep(0.05)

    def _lost(self, units: list[Unit], done: int, errors: Path, outcomes: dict[str, Outcome]) -> int:
        """The worker is gone. After a unit that failed, that is meant; otherwise the unit took it along."""
        if done and outcomes[units[done - 1].name].status == "error":
            return done
        tail = errors.read_text(errors="replace").strip()[-2000:]
        outcomes[units[done].name].status = "error"
        outcomes[units[done].name].error = without_paths(f"the process died: {tail or 'no message'}")
        print(f"  {units[done].name}: the process died", flush=True)
        return done + 1


def without_paths(text: str) -> str:
    """Results are published: no folder of the machine that made them."""
    return re.sub(r"(?:/[\w.+@~-]+)+/(?=[\w.+-]+)", "", text)


def collect(outcomes: dict[str, Outcome], device: str, tiny: bool, seconds: float) -> dict[str, Any]:
    """The JSON object of a run."""
    machine = outcomes["machine"].rows[0]
    prices = [row["profile"] for row in outcomes["prices"].rows if "profile" in row]
    return {
        "format": FORMAT,
        "is_gpu": device != "cpu",
        "tiny": tiny,
        "machine": machine,
        "seconds": round(seconds, 1),
        "units": {
            name: {
                "status": outcome.status,
                "error": without_paths(outcome.error),
                "seconds": round(outcome.seconds, 1),
                "rows": [row for row in outcome.rows if "profile" not in row],
            }
            for name, outcome in outcomes.items()
        },
        "whole_prices": prices[0] if prices else None,
    }


def has_failed(result: dict[str, Any]) -> bool:
    """Whether a unit met an error or a kernel was wrong. What is absent or was out of time is no failure."""
    units = result["units"].values()
    rows = (row for unit in units for row in unit["rows"])
    return any(unit["status"] == "error" for unit in units) or not all(row.get("right", True) for row in rows)


def file_stem(result: dict[str, Any]) -> str:
    """`gpu-check_<gpu>_<date>`; a rehearsal is never called a GPU's."""
    machine = result["machine"]
    if not result["is_gpu"]:
        return f"cpu-rehearsal_{machine['date']}"
    return f"gpu-check_{re.sub(r'[^a-z0-9]+', '-', machine['gpu'].lower()).strip('-')}_{machine['date']}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a rehearsal; always with --device cpu")
    parser.add_argument("--out", default="outputs/gpu_check", help="folder for the two files")
    parser.add_argument("--units", help="comma-separated; default all: " + ", ".join(u.name for u in UNITS))
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="for all units together")
    options = parser.parse_args()
    names = options.units.split(",") if options.units else [unit.name for unit in UNITS]
    if unknown := set(names) - {unit.name for unit in UNITS}:
        parser.error(f"no unit is called {', '.join(sorted(unknown))}")
    tiny, began = options.tiny or options.device == "cpu", time.time()
    units = [unit for unit in UNITS if unit.name == "machine" or unit.name in names]
    outcomes = Supervisor(options.device, tiny, options.seconds).run(units)
    if outcomes["machine"].status != "ok":
        print(f"nothing was measured: {outcomes['machine'].error}", file=sys.stderr)
        return 2
    every = {unit.name: outcomes.get(unit.name, Outcome()) for unit in UNITS}
    result = collect(every, options.device, tiny, time.time() - began)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / file_stem(result)
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + os.linesep, encoding="utf-8")
    summary = gpu_report.markdown(result)
    stem.with_suffix(".md").write_text(summary, encoding="utf-8")
    print(summary)
    print(f"written: {stem.with_suffix('.json')} and .md")
    return 1 if has_failed(result) else 0


if __name__ == "__main__":
    sys.exit(main())
