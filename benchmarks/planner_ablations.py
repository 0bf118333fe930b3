"""Degenerate batches, and what single decisions of the planner are worth. Makespans are modeled."""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.modeled import SHARES, batch_of, buckets, mean_memory_mib, suite_counts, table
from benchmarks.planner_runs import planner_for, suites, timed
from zellige_lightning.errors import PlanningError
from zellige_lightning.placement import Bucket, GlobalBatch, Topology
from zellige_lightning.planner import ProfileTable
from zellige_lightning.planner.bounds import lower_bound
from zellige_lightning.planner.fillers import FillerOverflowError
from zellige_lightning.planner.paper import _pack, solve_paper
from zellige_lightning.planner.solution import sums


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
        plan, (ms,) = timed(planner_for(topology, table(topology, 10, 8)), batch_of(counts.items()))
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
    """(e) Eq. (8) against rules for one resource behind the same anchors; longest-first sees no memory."""
    for ratio in (1.10, 1.04):
        print(f"\nfiller rule at {ratio:.2f} x mean memory: suites that pack, mean makespan over the bound %")
        for rule in ("Eq. (8)", "time only", "memory only", "longest-first"):
            overs = [
                over for suite in suites() if (over := _filler_over(rule, ratio, *suite[1:])) is not None
            ]
            mean = f"{statistics.mean(overs):.3f}" if overs else "-"
            print(f"{rule:14s} {len(overs):3d}  {mean}")


def _filler_over(rule: str, ratio: float, prices: ProfileTable, batch: GlobalBatch) -> float | None:
    """Percent over the bound that holds for every planner; None where the fillers do not pack."""
    made = planner_for(Topology.uniform(8), prices, int(ratio * mean_memory_mib(batch, 8)), "paper")
    problem, brief = made.problem(batch)
    # F decides which slack is the smaller one: out of reach it is always time, far away always memory.
    floor = {"time only": 0, "longest-first": 0, "memory only": 10**9}.get(rule, 1)
    told = replace(brief, whole_us=tuple(floor * us or 1 for us in brief.whole_us))
    try:
        solved = solve_paper(problem, told)
        if rule == "longest-first":
            kept = [cell for cell in solved.cells if cell.group in brief.anchors]
            free = replace(problem, cap_mib=1 << 40)
            solved = replace(solved, cells=tuple(kept + _pack(free, told, kept)))
    except (PlanningError, FillerOverflowError):
        return None
    loads, memory = sums(problem, solved.cells)
    return 100 * (max(loads) / lower_bound(problem)[0] - 1) if max(memory) <= problem.cap_mib else None


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
