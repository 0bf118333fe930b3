"""How well the profile predicts real training steps, and whether it ranks plans rightly:
`python benchmarks/profile_accuracy.py --json FILE`.

Every process is pinned to one core with one thread and trains a two-layer Wan model over gloo. Plans are the
covering array of every video resolution and configuration, corners without split sequences, single splits,
random placements and the planner's own choice, of mixed batches. Half of the batches are held out: all
figures are of their plans, which are run after the prices were frozen and hashed.

2 ranks are compared by wall clock. With more ranks than cores, wall clock says nothing; then the figures are
processor seconds of the busiest rank, and the output says so. Nothing here is a GPU's speed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accuracy_figures import Row, figures
from accuracy_ranks import Settings, run_rank
from accuracy_report import report
from ranks import has_own_core, machine, run_on_ranks

FULL = Settings(num_batches=18, plans_per_batch=7, repeats=5, profiler_repeats=5, profiler_budget_s=120.0)
QUICK = Settings(num_batches=10, plans_per_batch=5, repeats=5, profiler_repeats=5, profiler_budget_s=90.0)
SMOKE = Settings(num_batches=4, plans_per_batch=2, repeats=2, profiler_repeats=1, profiler_budget_s=5.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="half as many plans")
    size.add_argument("--smoke", action="store_true", help="a few plans: does it run? No figure means much")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--json", metavar="FILE", help="write the figures, and every plan's row")
    parser.add_argument("--report", metavar="FILE", help="write a dated Markdown report")
    options = parser.parse_args()
    settings = QUICK if options.quick else SMOKE if options.smoke else FULL
    clock = "wall" if has_own_core(options.ranks) else "cpu"
    found: dict[str, Any] = run_on_ranks(run_rank, options.ranks, options.ranks, settings)[0]
    rows: list[Row] = found["rows"]
    numbers = figures(rows, found["profiling_seconds"], clock)
    if options.json:
        document = {
            **numbers,
            "clock": clock,
            "machine": machine(),
            "ranks": options.ranks,
            "settings": asdict(settings),
            **{key: found[key] for key in ("frozen_sha256", "frozen_at", "seconds")},
            "cpu": figures(rows, found["profiling_seconds"], "cpu"),
            "profile": json.loads(found["profile"]),
            "plan_rows": [asdict(row) for row in rows],
        }
        Path(options.json).write_text(json.dumps(document), encoding="utf-8")
    text = report(rows, numbers, found, clock, options.ranks, settings)
    if options.report:
        Path(options.report).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
