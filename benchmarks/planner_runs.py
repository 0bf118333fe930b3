"""What all planner benchmarks share: budgets, suites, and how one planning is timed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from benchmarks.modeled import HEADS, MEMORY, SHARES, batch_of, suite_counts, table
from zellige_lightning.errors import PlanningError
from zellige_lightning.placement import GlobalBatch, Plan, Topology
from zellige_lightning.planner import PlannerConfig, ProfileTable, make_planner
from zellige_lightning.planner.planner import BatchPlanner

CAP_MIB = 59_392  # 58 GiB
KINDS = {"high": (10, 350_000), "low": (10, 125_000), "15 s": (15, 350_000)}


def planner_for(
    topology: Topology, prices: ProfileTable, cap_mib: int = CAP_MIB, name: str = "exact", **settings: Any
) -> BatchPlanner:
    config = PlannerConfig(name, **settings)
    made = make_planner(config, prices, MEMORY, topology, HEADS, cap_mib)
    made.prepare()
    return made


def timed(planner: BatchPlanner, batch: GlobalBatch, repeats: int = 1) -> tuple[Plan | None, list[float]]:
    """The plan, or None without result, and the milliseconds of each repeat with the cache emptied."""
    plan, times = None, []
    for _ in range(repeats):
        planner.forget()
        start = time.perf_counter()
        try:
            plan = planner.plan(batch)
        except PlanningError:
            plan = None
        times.append((time.perf_counter() - start) * 1e3)
    return plan, times


def suites() -> Iterable[tuple[str, ProfileTable, GlobalBatch]]:
    """The 18 eight-rank suites: three kinds times six shares of video tokens."""
    for kind, (seconds, budget) in KINDS.items():
        prices = table(Topology.uniform(8), seconds, 8)
        for share in SHARES:
            yield f"{kind} V{share}", prices, batch_of(suite_counts(share, seconds, 8 * budget).items())
