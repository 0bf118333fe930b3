"""Planning time and quality on the modeled suites: `python benchmarks/planner.py [--quick] [--json FILE]`.

Prints Table III's rows and ours, random batches, many ranks, tight memory, degenerate batches and ablations.
Times are of this machine, with the model build and without the plan cache; makespans are modeled.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.modeled import (
    HEADS,
    MEMORY,
    SHARES,
    batch_of,
    buckets,
    mean_memory_mib,
    random_counts,
    suite_counts,
    table,
)
from zellige_lightning.errors import PlanningError
from zellige_lightning.placement import Bucket, GlobalBatch, Plan, Topology
from zellige_lightning.planner import PlannerConfig, ProfileTable, make_planner
from zellige_lightning.planner.checker import check
from zellige_lightning.planner.compiled import HAS_NUMBA
from zellige_lightning.planner.fillers import FillerOverflowError
from zellige_lightning.planner.instances import placements, plain
from zellige_lightning.planner.paper import solve_paper
from zellige_lightning.planner.planner import BatchPlanner
from zellige_lightning.planner.solution import sums

CAP_MIB = 59_392  # 58 GiB
KINDS = {"high": (10, 350_000), "low": (10, 125_000), "15 s": (15, 350_000)}
LARGE = {16: (15, 350_000), 32: (15, 175_000), 256: (10, 350_000), 1024: (10, 350_000)}
Figures = dict[str, float]


def planner_for(
    topology: Topology, prices: ProfileTable, cap_mib: int = CAP_MIB, name: str = "exact", **settings: Any
) -> BatchPlanner:
    config = PlannerConfig(name, **settings)
    made = make_planner(config, prices, MEMORY, topology, HEADS, cap_mib)
    made.prepare()
    return made


def timed(planner: BatchPlanner, batch: GlobalBatch, repeats: int = 1) -> tuple[Plan | None, float]:
    """The plan, or None without result, and the median milliseconds with the cache emptied."""
    plan, times = None, []
    for _ in range(repeats):
        planner.forget()
        start = time.perf_counter()
        try:
            plan = planner.plan(batch)
        except PlanningError:
            plan = None
        times.append((time.perf_counter() - start) * 1e3)
    return plan, statistics.median(times)


def suites() -> Iterable[tuple[str, ProfileTable, GlobalBatch]]:
    """The 18 eight-rank suites: three kinds times six shares of video tokens."""
    for kind, (seconds, budget) in KINDS.items():
        prices = table(Topology.uniform(8), seconds, 8)
        for share in SHARES:
            yield f"{kind} V{share}", prices, batch_of(suite_counts(share, seconds, 8 * budget).items())


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
    print("\nsuite       exact ms  gap %    splits (proven)  paper ms  splits  paper over bound %")
    for name, prices, batch in suites():
        exact = planner_for(topology, prices)
        plan, ms = timed(exact, batch, 5)
        assert plan is not None
        gap = certified_gap(exact, batch, plan)
        row = {"ms": ms, "gap": gap, "splits": plan.num_splits, "proven": plan.statuses[1] == "OPTIMAL"}
        line = f"{name:10s} {ms:9.2f}  {gap:6.4f}  {plan.num_splits:3d} ({row['proven']!s:5s})"
        if with_paper:
            paper, paper_ms = timed(planner_for(topology, prices, name="paper"), batch, 3)
            row["paper_ms"] = paper_ms
            if paper is None:
                line += f"  {paper_ms:14.1f}  no plan"
            else:
                over = 100 * (paper.makespan_us / plan.lower_bound_us - 1)
                row |= {"paper_splits": paper.num_splits, "over": over}
                assert plan.makespan_us <= paper.makespan_us * 1.001, name
                line += f"  {paper_ms:14.1f}  {paper.num_splits:6d}  {over:10.3f}"
        rows.append(row)
        print(line)
    return summary(rows, with_paper)


def summary(rows: list[dict[str, Any]], with_paper: bool) -> Figures:
    figures = {
        "suites_max_gap_pct": max(r["gap"] for r in rows),
        "suites_median_ms": statistics.median(r["ms"] for r in rows),
        "suites_min_splits_proven": sum(r["proven"] for r in rows),
        "splits_exact_mean": statistics.mean(r["splits"] for r in rows),
    }
    if with_paper:
        solved = [r for r in rows if "over" in r]
        figures["paper_median_ms"] = statistics.median(r["paper_ms"] for r in rows)
        figures["speedup_vs_paper"] = figures["paper_median_ms"] / figures["suites_median_ms"]
        figures["paper_failures"] = len(rows) - len(solved)
        figures["overhead_paper_vs_joint_pct_max"] = max(r["over"] for r in solved)
        figures["splits_paper_mean"] = statistics.mean(r["paper_splits"] for r in solved)
    return figures


def table_3(quick: bool) -> None:
    """(a) Table III's four formulations on the high-load suites; one suite and a limit of 10 s where
    quick."""
    limit = 10.0 if quick else 600.0
    prices, topology = table(Topology.uniform(8), 10, 8), Topology.uniform(8)
    rows = [("Joint", "joint", False), ("Joint +ECF", "joint", True), ("Two-stage", "paper", False)]
    rows.append(("Two-stage +ECF", "paper", True))
    print(f"\nTable III, modeled, seconds; limit {limit:.0f} s of deterministic time")
    for title, name, ecf in rows:
        cells = []
        for share in SHARES[:1] if quick else SHARES:
            batch = batch_of(suite_counts(share, 10, 8 * 350_000).items())
            made = planner_for(topology, prices, name=name, ecf=ecf, deterministic_limit=limit)
            plan, ms = timed(made, batch)
            cells.append(f"{ms / 1e3:.3f}" if plan else f"no result in {limit:.0f} s")
        print(f"{title:16s} " + "  ".join(cells), flush=True)


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
        plan, ms = timed(made, batch)
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
    print("\nranks  share  sequences      ms   gap %  bound      splits")
    for world, (seconds, budget) in LARGE.items():
        topology = Topology.uniform(world, 8)
        made = planner_for(topology, table(topology, seconds, 16))
        worst_ms, worst_gap = 0.0, 0.0
        for share in SHARES:
            batch = batch_of(suite_counts(share, seconds, world * budget).items())
            plan, ms = timed(made, batch)
            assert plan is not None
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


def degenerate_rows() -> None:
    """(d) inputs known to be hard or degenerate."""
    video, image = buckets(10)[:3], buckets(10)[3:]
    cases: dict[str, tuple[int, dict[Bucket, int]]] = {
        "24 x 480p + 6 x 720p": (8, {video[0]: 24, video[1]: 6}),
        "one giant": (8, {video[2]: 1}),
        "seven equal videos": (8, {video[1]: 7}),
        "no fillers": (8, {video[1]: 5, video[2]: 2}),
        "no anchors": (8, {image[0]: 400, image[3]: 41}),
        "fewer than ranks": (8, {video[0]: 3}),
        "images that must split": (4, {image[3]: 5, image[2]: 3}),
        "one rank": (1, {video[0]: 2, image[1]: 9}),
        "six ranks": (6, {video[2]: 2, video[1]: 2, video[0]: 1, image[2]: 60}),
        "thirteen ranks": (13, {video[2]: 4, video[1]: 3, video[0]: 6, image[1]: 300}),
    }
    print("\ndegenerate                ms   gap %  splits")
    for name, (world, counts) in cases.items():
        topology = Topology.uniform(world)
        plan, ms = timed(planner_for(topology, table(topology, 10, 8)), batch_of(counts.items()))
        result = f"{100 * plan.gap:6.3f}  {plan.num_splits}" if plan else "no plan"
        print(f"{name:24s} {ms:6.2f}  {result}")


def epsilon_rows() -> None:
    """(e) what the slack of Eq. (7) buys."""
    print("\nepsilon: mean splits, mean gap % over the suites")
    for epsilon in (0.0, 1e-3, 1e-2):
        plans = [planner_for(Topology.uniform(8), p, epsilon=epsilon).plan(b) for _, p, b in suites()]
        splits, gap = (statistics.mean(x) for x in ([p.num_splits for p in plans], [p.gap for p in plans]))
        print(f"{epsilon:7.0e}: {splits:.2f}, {100 * gap:.3f}")


def filler_rule_rows() -> None:
    """(e) Eq. (8) against rules for one resource, behind the same anchors, at 1.1 times the mean memory."""
    print("\nfiller rule: suites that pack, mean makespan over the bound %")
    for rule in ("Eq. (8)", "time only", "memory only"):
        overs = []
        for _, prices, batch in suites():
            made = planner_for(Topology.uniform(8), prices, int(1.1 * mean_memory_mib(batch, 8)), "paper")
            try:
                problem, brief = made.problem(batch)
                if rule == "time only":  # the floor F is out of reach, so the time slack decides
                    solved = solve_paper(problem, replace(brief, whole_us=tuple(1 for _ in brief.whole_us)))
                elif rule == "memory only":
                    solved = solve_paper(
                        problem, replace(brief, whole_us=tuple(10**9 * w for w in brief.whole_us))
                    )
                else:
                    solved = solve_paper(problem, brief)
            except (PlanningError, FillerOverflowError):
                continue
            bound = made.plan(batch).lower_bound_us if rule == "Eq. (8)" else area(problem)
            overs.append(100 * (max(sums(problem, solved.cells)[0]) / bound - 1))
        print(f"{rule:12s} {len(overs):3d}  {statistics.mean(overs) if overs else float('nan'):.3f}")


def area(problem: Any) -> int:
    from zellige_lightning.planner.bounds import lower_bound

    return lower_bound(problem)[0]


def topology_rows() -> None:
    """(e) 16 ranks on two nodes, planned with and without knowing that links between nodes are slower."""
    topology = Topology.uniform(16, 8)
    prices = table(topology, 15, 16)
    same = {(n, c, w): prices.prices_us.get((n, c, "node"), us) for (n, c, w), us in prices.prices_us.items()}
    blind = replace(prices, prices_us=same)
    print("\ntopology-blind over aware, modeled %")
    for share in SHARES:
        batch = batch_of(suite_counts(share, 15, 16 * 350_000).items())
        aware = planner_for(topology, prices).plan(batch)
        unaware = planner_for(topology, blind).plan(batch)
        loads = [0] * 16
        for sequence, option in zip(batch.sequences, unaware.options, strict=True):
            us = prices.price_us(sequence.bucket, option.config, topology.class_of(option.ranks))
            for rank in option.ranks:
                loads[rank] += us or 0
        print(f"V{share}: {100 * (max(loads) / aware.makespan_us - 1):.3f}")


def without_numba() -> float:
    """Median of the suites in a process that does not compile."""
    command = [sys.executable, __file__, "--suites-only"]
    done = subprocess.run(
        command, env=os.environ | {"NUMBA_DISABLE_JIT": "1"}, capture_output=True, text=True, check=True
    )
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures["suites_median_ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: joint rows on one suite, limit 10 s"
    )
    parser.add_argument("--json", type=Path, help="write the figures as one flat object")
    parser.add_argument(
        "--suites-only", action="store_true", help="the 18 suites without the paper's planner"
    )
    options = parser.parse_args()
    if options.suites_only:
        print(json.dumps(suite_rows(with_paper=False)))
        return
    print(
        f"{datetime.date.today()}  {platform.machine()}  {os.cpu_count()} CPUs",
        f" Python {platform.python_version()}",
        end="",
    )
    print(f"  {'compiled' if HAS_NUMBA else 'plain Python'}; modeled makespans, cap {CAP_MIB} MiB")
    figures = suite_rows(with_paper=True) | {"suites_median_ms_nonumba": without_numba()}
    figures |= random_rows(400) | large_rows() | tight_rows()
    degenerate_rows()
    epsilon_rows()
    filler_rule_rows()
    topology_rows()
    table_3(options.quick)
    print("\n" + json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
