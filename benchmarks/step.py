"""All policies on the same batches with real processes and real training steps: `python benchmarks/step.py`.

Every process is pinned to one core with one thread. All policies share one model, one profile and one
engine, and take turns batch by batch, so that what else the machine does meets all of them. Figures are
medians over the calmer half of the steps: the kernel tells how long each waited for its core, and a fixed
loop before and behind it how fast that was.

2 ranks are compared by wall clock. With more ranks than cores, wall clock says nothing; then the figures
are the CPU seconds of the busiest rank, and the output says so. Nothing here is a GPU's speed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from ranks import has_own_core
from step_ranks import Job, StepTime, run_rank
from step_report import AGAIN, OURS, Entry, Measured, Placement, flat_figures, write

from zellige_lightning.placement import Bucket, ParallelConfig, Plan

VIDEO, SHORT = Bucket("video", (8, 16, 16)), Bucket("short-video", (5, 12, 16))
LARGE, SMALL = Bucket("image-256", (1, 16, 16)), Bucket("image-64", (1, 8, 8))
Batch = tuple[tuple[Bucket, int], ...]
# The first four have one dominant video beside a few images; the measured profile says how dominant it is.
BATCHES: tuple[Batch, ...] = (
    ((VIDEO, 1), (SMALL, 1)),
    ((VIDEO, 1), (SMALL, 2)),
    ((VIDEO, 1), (SMALL, 3)),
    ((VIDEO, 1), (LARGE, 1)),
    ((VIDEO, 1), (LARGE, 4), (SMALL, 8)),
    ((VIDEO, 1), (SHORT, 1), (SMALL, 4)),
    ((VIDEO, 2), (LARGE, 2)),
    ((SHORT, 3), (LARGE, 3)),
    ((SHORT, 1), (SMALL, 24)),
    ((LARGE, 5), (SMALL, 9)),
)
QUICK_RIVALS = ("naive", "adaptive_load", "usp", "knapformer")
ALL_RIVALS = ("paper", *QUICK_RIVALS, "disjoint", "flexsp", "megatron", "hotspa", "bytescale", "skrull")
REPEATS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rivals")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--json", metavar="FILE", help="write flat figures")
    parser.add_argument("--report", metavar="FILE", help="write a dated Markdown report")
    options = parser.parse_args()
    measured = measure(options.ranks, BATCHES, QUICK_RIVALS if options.quick else ALL_RIVALS, REPEATS)
    figures = flat_figures(measured)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    text = write(measured, figures)
    if options.report:
        Path(options.report).write_text(text, encoding="utf-8")
    print(text)


def measure(ranks: int, batches: Sequence[Batch], rivals: Sequence[str], repeats: int) -> Measured:
    """All rivals, ours and ours once more on all batches."""
    entries = (OURS, *rivals, OURS)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(ranks, f"{folder}/store", tuple(batches), entries, rounds=2 * repeats)
        with ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(run_rank, rank, job) for rank in range(ranks)]
            results = [future.result() for future in futures]
    plans: dict[str, list[Plan | None]] = results[0]["plans"]
    found = {
        name: [
            _entry([r["times"].get((e, b), []) for r in results], batch, plans[entries[e]][b])
            for b, batch in enumerate(batches)
        ]
        for e, name in enumerate([*entries[:-1], AGAIN])
    }
    dominance = [_dominance(batch, results[0]["whole_us"]) for batch in batches]
    return Measured(ranks, repeats, batches, found, dominance)


def _dominance(batch: Batch, whole_us: dict[str, int]) -> float:
    """Share of the dearest sequence in the price of all, kept whole."""
    prices = [whole_us[bucket.name] for bucket, count in batch for _ in range(count)]
    return max(prices) / sum(prices)


def _entry(of_ranks: list[list[StepTime]], batch: Batch, plan: Plan | None) -> Entry | None:
    if plan is None:
        return None
    steps = list(zip(*of_ranks, strict=True))
    calm = sorted(steps, key=_lost_share)[: len(steps) // 2]
    walls = tuple(max(step.wall_s for step in ranks) for ranks in calm)
    busiest = tuple(max(step.cpu_s for step in ranks) for ranks in calm)
    shares = [max(s.cpu_s for s in ranks) * len(ranks) / sum(s.cpu_s for s in ranks) for ranks in calm]
    losses = [sum(step.loss for step in ranks) / len(ranks) for ranks in calm]
    return Entry(
        makespans_s=walls if has_own_core(len(of_ranks)) else busiest,
        busiest_cpus_s=busiest,
        imbalance=median(shares),
        predicted_s=plan.predicted_us / 1e6,
        loss=median(losses),
        lost_share=max(map(_lost_share, calm)),
        placement=_placement(plan, batch),
    )


def _lost_share(ranks: Sequence[StepTime]) -> float:
    """Of the rank that lost most."""
    return max(step.lost_share for step in ranks)


def _placement(plan: Plan, batch: Batch) -> Placement:
    names = [bucket.name for bucket, count in batch for _ in range(count)]
    held: list[list[tuple[str, ParallelConfig]]] = [[] for _ in range(plan.world_size)]
    for name, option in zip(names, plan.options, strict=True):
        for rank in option.ranks:
            held[rank].append((name, option.config))
    return tuple(sorted(tuple(sorted(of_rank)) for of_rank in held))


if __name__ == "__main__":
    main()
