"""Planning time and quality on the modeled suites: `python benchmarks/planner.py [--quick] [--json FILE]`.

Prints Table III's rows and ours, random batches, many ranks, tight memory, degenerate batches and ablations.
Times are of this machine, with the model build and without the plan cache; makespans are modeled. A full run
writes docs/results/DATE-planner.md.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.modeled import SHARES, batch_of, mean_memory_mib, random_counts, suite_counts, table  # noqa: E402
from benchmarks.planner_ablations import degenerate_rows, epsilon_rows, filler_rule_rows, topology_rows  # noqa: E402
from benchmarks.planner_runs import CAP_MIB, planner_for, suites, timed  # noqa: E402
from zellige_lightning.errors import PlanningError  # noqa: E402
from zellige_lightning.placement import GlobalBatch, Plan, Topology  # noqa: E402
from zellige_lightning.planner.checker import check  # noqa: E402
from zellige_lightning.planner.compiled import HAS_NUMBA  # noqa: E402
from zellige_lightning.planner.instances import placements, plain  # noqa: E402
from zellige_lightning.planner.planner import BatchPlanner  # noqa: E402

REPEATS, PAPER_REPEATS = 9, 3
QUICK_LIMIT = 6.0  # CP-SAT's deterministic seconds; about 10 of a clock
LARGE = {16: (15, 350_000), 32: (15, 175_000), 256: (10, 350_000), 1024: (10, 350_000)}
Figures = dict[str, float]


def certified_gap(planner: BatchPlanner, batch: GlobalBatch, plan: Plan) -> float:
    """The gap in percent, after the independent checker agreed with the placement and its claims."""
    problem, brief = planner.problem(batch)
    solution = planner.solve(problem, brief)
    claims = {"makespan": plan.makespan_us, "bound": plan.lower_bound_us, "splits": plan.num_splits}
    verdict = check(plain(problem), placements(problem, solution.cells), claims)
    assert not verdict.faults, verdict.faults
    return 100 * plan.gap


def suite_rows(with_paper: bool) -> Figures:
    """(a) the 18 suites: ours against Algorithm 1 in the same run."""
    topology, rows = Topology.uniform(8), []
    print(
        f"\n18 suites on 8 ranks; median ms of {REPEATS} repeats, of {PAPER_REPEATS} for the paper's planner"
    )
    print("suite       exact ms  gap %    splits (proven)  paper ms  splits  paper over bound %")
    for name, prices, batch in suites():
        exact = planner_for(topology, prices)
        plan, times = timed(exact, batch, REPEATS if with_paper else PAPER_REPEATS)
        assert plan is not None
        gap = certified_gap(exact, batch, plan)
        row = {"times": times, "ms": statistics.median(times), "gap": gap, "splits": plan.num_splits}
        row["proven"] = plan.statuses[1] == "OPTIMAL"
        line = f"{name:10s} {row['ms']:9.2f}  {gap:6.4f}  {plan.num_splits:3d} ({row['proven']!s:5s})"
        if with_paper:
            paper, paper_times = timed(planner_for(topology, prices, name="paper"), batch, PAPER_REPEATS)
            row["paper_ms"] = statistics.median(paper_times)
            line += f"  {row['paper_ms']:14.1f}"
            if paper is None:
                line += "  no plan"
            else:
                over = 100 * (paper.makespan_us / plan.lower_bound_us - 1)
                row |= {"paper_splits": paper.num_splits, "over": over}
                row["versus"] = 100 * (plan.makespan_us / paper.makespan_us - 1)
                line += f"  {paper.num_splits:6d}  {over:10.3f}"
        rows.append(row)
        print(line)
    return summary(rows, with_paper)


def summary(rows: list[dict[str, Any]], with_paper: bool) -> Figures:
    times = sorted(ms for row in rows for ms in row["times"])
    figures = {
        "suites_max_gap_pct": max(r["gap"] for r in rows),
        "suites_median_ms": statistics.median(r["ms"] for r in rows),
        "suites_p99_ms": times[int(0.99 * len(times))],
        "suites_min_splits_proven": sum(r["proven"] for r in rows),
        "splits_exact_mean": statistics.mean(r["splits"] for r in rows),
    }
    if with_paper:
        solved = [r for r in rows if "over" in r]
        figures["paper_median_ms"] = statistics.median(r["paper_ms"] for r in rows)
        figures["speedup_vs_paper"] = figures["paper_median_ms"] / figures["suites_median_ms"]
        figures["paper_failures"] = len(rows) - len(solved)
        figures["overhead_paper_vs_joint_pct_max"] = max(r["over"] for r in solved)
        figures["exact_over_paper_pct_max"] = max(r["versus"] for r in solved)
        figures["splits_paper_mean"] = statistics.mean(r["paper_splits"] for r in solved)
    return figures


def table_3(limit: float, quick: bool) -> None:
    """(a) Table III's four formulations and ours on the suites; on one of them where quick."""
    topology = Topology.uniform(8)
    rows = [("Joint", "joint", False), ("Joint +ECF", "joint", True), ("Two-stage", "paper", False)]
    rows += [("Two-stage +ECF", "paper", True), ("exact", "exact", True)]
    chosen = list(suites())[: 1 if quick else None]
    print(f"\nTable III's rows and ours, modeled, ms; limit {limit:.0f} s of deterministic time per round")
    print(" " * 10 + "".join(f"{title:>16s}" for title, _, _ in rows))
    for suite, prices, batch in chosen:
        print(f"{suite:10s}", end="")
        for _, name, ecf in rows:
            made = planner_for(topology, prices, name=name, ecf=ecf, deterministic_limit=limit)
            plan, (ms,) = timed(made, batch)
            print(f"{ms:16.1f}" if plan else f"no result, {ms / 1e3:.0f} s".rjust(16), end="", flush=True)
        print()


def random_rows(count: int) -> Figures:
    """(b) random eight-rank batches, memory caps of 0.9 to 2 times the mean memory; waves where they must
    be."""
    topology = Topology.uniform(8)
    prices = {seconds: table(topology, seconds, 8) for seconds in (10, 15)}
    times, gaps, whole, waves, failures = [], [], 0, 0, 0
    for seed in range(count):
        rng = random.Random(seed)
        seconds, budget = rng.choice([10, 15]), rng.choice([125_000, 175_000, 250_000, 350_000])
        batch = batch_of(random_counts(rng, seconds, 8 * budget).items())
        cap = int(mean_memory_mib(batch, 8) * rng.uniform(0.9, 2.0))
        made = planner_for(topology, prices[seconds], cap)
        plan, (ms,) = timed(made, batch)
        times.append(ms)
        if plan is not None:
            gaps.append(plan.gap)
            whole += plan.num_splits == 0
            continue
        try:
            waves += 1
            gaps += [wave.plan.gap for wave in made.plan_waves(batch)]
        except PlanningError:
            failures += 1
    times.sort()
    share = sum(gap <= 1e-3 for gap in gaps) / len(gaps)
    print(f"\n{count} random batches: {failures} failures, {waves} in waves, {whole} all whole,", end=" ")
    print(f"{100 * share:.2f} % within 0.1 %, worst gap {100 * max(gaps):.2f} %,", end=" ")
    print(
        f"ms median {statistics.median(times):.2f} p99 {times[int(0.99 * len(times))]:.2f} "
        f"max {times[-1]:.1f}"
    )
    return {
        "random_failures": failures,
        "random_share_within_0p1": share,
        "random_p99_ms": times[int(0.99 * len(times))],
        "random_all_whole": whole / count,
    }


def large_rows() -> Figures:
    """(c) many ranks in nodes of eight, the worst of six shares."""
    figures: Figures = {}
    print("\nmany ranks in nodes of eight; median ms of 3 repeats (1,024: of one)")
    print("ranks  share  sequences      ms   gap %  bound      splits")
    for world, (seconds, budget) in LARGE.items():
        topology = Topology.uniform(world, 8)
        made = planner_for(topology, table(topology, seconds, 16))
        worst_ms, worst_gap = 0.0, 0.0
        for share in SHARES:
            batch = batch_of(suite_counts(share, seconds, world * budget).items())
            made.problem(batch)  # lists the options of each bucket, once per run and not per batch
            plan, times = timed(made, batch, 1 if world > 256 else 3)
            assert plan is not None
            ms = statistics.median(times)
            worst_ms, worst_gap = max(worst_ms, ms), max(worst_gap, 100 * plan.gap)
            print(f"{world:5d}  V{share}  {len(batch.sequences):9d}  {ms:7.1f}", end="  ")
            print(f"{100 * plan.gap:6.3f}  {plan.bound_source:9s} {plan.num_splits:6d}", flush=True)
        figures |= {f"ranks{world}_ms": worst_ms, f"ranks{world}_gap_pct": worst_gap}
    return figures


def tight_rows() -> Figures:
    """Memory caps around the mean memory: waves, and what they cost over the plan without a cap."""
    topology, prices = Topology.uniform(8), table(Topology.uniform(8), 10, 8)
    failures, most, worst = 0, 0, 0.0
    print("\ncap / mean memory: waves, cost over no cap %")
    for share in (35, 50, 60):
        batch = batch_of(suite_counts(share, 10, 8 * 350_000).items())
        free = planner_for(topology, prices, 10**6).plan(batch).makespan_us
        for ratio in (1.10, 1.06, 1.03, 0.75):
            made = planner_for(topology, prices, int(mean_memory_mib(batch, 8) * ratio))
            try:
                waves = made.plan_waves(batch)
            except PlanningError:
                failures += 1
                continue
            cost = 100 * (sum(w.plan.makespan_us for w in waves) / free - 1)
            most, worst = max(most, len(waves)), max(worst, cost)
            print(f"V{share}  {ratio:.2f}: {len(waves)} waves, {cost:.2f} %")
    return {"tight_failures": failures, "tight_waves_max": most, "tight_cost_pct_max": worst}


def without_numba() -> float:
    """Median of the suites in a process that does not compile."""
    command = [sys.executable, __file__, "--suites-only"]
    done = subprocess.run(
        command, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=True
    )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures["suites_median_ms"]


class Tee(io.TextIOBase):
    """Keeps what is printed, and prints it."""

    def __init__(self) -> None:
        self.text, self.terminal = "", sys.stdout

    def write(self, text: str) -> int:
        self.text += text
        return self.terminal.write(text)

    def flush(self) -> None:
        self.terminal.flush()


RESULTS = """# Planning: time, certified gap and splits

{date}. What `python benchmarks/planner.py{options}` printed. Times were measured on {cpus} CPUs ({machine}),
Python {python}, {load}; model build included, plan cache off. Nothing ran on a GPU: all prices, hence
all makespans and gaps, are modeled (`benchmarks/modeled.py`: Wan2.1-1.3B geometry, 312 TFLOP/s, 110 GB/s
inside a node, 11 GB/s per rank across). "Gap" is the certified distance from the proven bound; for the 18
suites the independent checker recomputes it from the placement.

```
{text}```
"""


@contextmanager
def recorded(folder: Path | None, options: str) -> Iterator[None]:
    """Writes what is printed inside to FOLDER/DATE-planner.md."""
    tee, busy = Tee(), os.getloadavg()[0]
    with redirect_stdout(tee):
        yield
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        load = f"load average {busy:.1f} when it began"
        text = RESULTS.format(
            date=datetime.date.today(), options=options, cpus=os.cpu_count(), machine=platform.machine(),
            python=platform.python_version(), load=load, text=tee.text.lstrip("\n"),
        )  # fmt: skip
        (folder / f"{datetime.date.today()}-planner.md").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: Table III on one suite, limit 10 s"
    )
    parser.add_argument("--json", type=Path, help="write the figures as one flat object")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per round of Table III's rows")
    parser.add_argument(
        "--suites-only", action="store_true", help="the 18 suites without the paper's planner"
    )
    options = parser.parse_args()
    if options.suites_only:
        print(json.dumps(suite_rows(with_paper=False)))
        return
    limit = QUICK_LIMIT if options.quick else options.limit
    shown = " --quick" if options.quick else f" --limit {limit:.0f}"
    with recorded(None if options.quick else ROOT / "docs" / "results", shown):
        figures = everything(limit, options.quick)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


def everything(limit: float, quick: bool) -> Figures:
    """All sections; the figures of the sections that have any."""
    print(f"{datetime.date.today()}  {platform.machine()}  {os.cpu_count()} CPUs", end="  ")
    print(f"Python {platform.python_version()}  {'compiled' if HAS_NUMBA else 'plain Python'}", end="; ")
    print(f"modeled makespans, cap {CAP_MIB} MiB, aligned rank sets")
    figures = suite_rows(with_paper=True) | {"suites_median_ms_nonumba": without_numba()}
    figures |= random_rows(400) | large_rows() | tight_rows()
    degenerate_rows()
    epsilon_rows()
    filler_rule_rows()
    topology_rows()
    table_3(limit, quick)
    print("\n" + json.dumps(figures, indent=1))
    return figures


if __name__ == "__main__":
    main()
