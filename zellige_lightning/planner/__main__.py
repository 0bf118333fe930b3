"""`python -m zellige_lightning.planner PROBLEMS.json --planner exact`: solves a list of plain problems,
one JSON line each, every placement checked. The format is that of `checker`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zellige_lightning.errors import ConfigError, PlanningError, ZelligeError
from zellige_lightning.planner.checker import check
from zellige_lightning.planner.fillers import FillerOverflowError
from zellige_lightning.planner.instances import make_brief, placements, read_problem
from zellige_lightning.planner.planner import PLANNERS, PlannerConfig, load_solve
from zellige_lightning.planner.solution import Solution, num_splits, sums


def solve_one(data: Mapping[str, Any], config: PlannerConfig) -> dict[str, Any]:
    """One output line. `status` is `optimal` (bound met), `certified` (within epsilon), `feasible`, or
    `failed`."""
    problem = read_problem(data)
    start = time.perf_counter()
    row: dict[str, Any] = {"name": data.get("name"), "status": "failed", "planner": config.name}
    try:
        solution = _solve(problem, config)
    except (PlanningError, FillerOverflowError) as error:
        return row | {"reason": str(error), "ms": _ms(start)}
    row["ms"] = _ms(start)
    makespan, bound = max(sums(problem, solution.cells)[0]), solution.bound_us
    row |= {"makespan": makespan, "bound": bound, "splits": num_splits(solution.cells)}
    row["split_bound"] = solution.split_bound
    row["status"] = _status(makespan, bound, config.epsilon)
    row["statuses"] = list(solution.statuses)
    row["placements"] = placements(problem, solution.cells)
    row["faults"] = list(check(data, row["placements"], row).faults)
    return row


def _solve(problem: Any, config: PlannerConfig) -> Solution:
    for group in problem.groups:
        if not group.choices:
            raise PlanningError(
                f"{group.bucket} fits no option under the cap of {problem.cap_mib}", fix="raise the cap"
            )
    return load_solve(config.name)(problem, make_brief(problem, config))


def _status(makespan: int, bound: int, epsilon: float) -> str:
    if makespan == bound:
        return "optimal"
    return "certified" if makespan <= bound + int(bound * epsilon) else "feasible"


def _ms(start: float) -> float:
    return round((time.perf_counter() - start) * 1e3, 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 where a placement failed its check; 2 for input that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m zellige_lightning.planner", description=__doc__)
    parser.add_argument("problems", type=Path, help="JSON list of problems")
    parser.add_argument("--planner", choices=sorted(PLANNERS), default="exact")
    parser.add_argument("--epsilon", type=float, default=1e-3, help="relative slack of the split round")
    options = parser.parse_args(arguments)
    faults = 0
    try:
        config = PlannerConfig(options.planner, epsilon=options.epsilon)
        for data in json.loads(options.problems.read_text(encoding="utf-8")):
            row = solve_one(data, config)
            faults += len(row.get("faults", []))
            print(json.dumps(row), flush=True)
    except (OSError, json.JSONDecodeError, TypeError) as error:
        print(ConfigError(f"{options.problems}: {error}", fix="a JSON list of problems"), file=sys.stderr)
        return 2
    except ZelligeError as error:
        print(error, file=sys.stderr)
        return 2
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
