"""The attention engine against its alternatives, in one run on this machine: `python benchmarks/engine.py`.

Two processes, each pinned to a core. Every comparison interleaves its variants and takes medians, so that
what else the machine does hits all alike. Ratios above 1 say that the engine's way is faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F
from ranks import machine, run_on_ranks
from torch import Tensor

from zellige_lightning.engine import CoalescedAttentionEngine, ProcessGroupCache
from zellige_lightning.placement import ParallelConfig, PlacementOption, build_schedule, whole

HEADS, DIM = 12, 64
LONG, IMAGE, IMAGES = 4096, 256, 16
SPLITS = {
    "ulysses": ParallelConfig(1, 2, 1),
    "allgather": ParallelConfig(2, 1, 1),
    "ring": ParallelConfig(1, 1, 2),
}
Variant = Callable[[], None]


def random_qkv(tokens: int) -> list[Tensor]:
    return [torch.randn(tokens, HEADS, DIM, requires_grad=True) for _ in range(3)]


def planned(
    engine: CoalescedAttentionEngine, rank: int, options: list[PlacementOption], length: int
) -> Variant:
    """Forward and backward of the engine with every sequence of `length` tokens placed by `options`."""
    schedule = build_schedule(options, [length] * len(options), rank, 2)
    inputs = random_qkv(schedule.num_tokens)

    def run() -> None:
        engine.install(schedule)
        engine(*inputs).sum().backward()

    return run


def plain(lengths: list[int]) -> Variant:
    """Forward and backward of plain attention, one call per sequence."""
    inputs = [random_qkv(length) for length in lengths]

    def run() -> None:
        for qkv in inputs:
            q, k, v = (x.transpose(0, 1)[None] for x in qkv)
            F.scaled_dot_product_attention(q, k, v).sum().backward()

    return run


def medians_s(variants: dict[str, Variant], repeats: int) -> dict[str, float]:
    """Median seconds of each variant; all ranks start each run together, variants take turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            torch.distributed.barrier()
            began = time.perf_counter()
            run()
            times[name] += [time.perf_counter() - began] if repeat else []
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def split_against_whole(rank: int, engine: CoalescedAttentionEngine, repeats: int) -> dict[str, float]:
    variants = {
        name: planned(engine, rank, [PlacementOption(config, (0, 1))], LONG)
        for name, config in SPLITS.items()
    }
    # The whole sequence runs on both ranks at once, so that both cores are busy in every variant.
    variants["whole"] = planned(engine, rank, [whole(rank)], LONG)
    variants["plain"] = plain([LONG])
    return medians_s(variants, repeats)


def images(rank: int, engine: CoalescedAttentionEngine, repeats: int) -> dict[str, float]:
    variants = {
        name: planned(engine, rank, [PlacementOption(config, (0, 1))] * IMAGES, IMAGE)
        for name, config in SPLITS.items()
    }
    variants["whole"] = planned(engine, rank, [whole(i % 2) for i in range(IMAGES)], IMAGE)
    variants["plain"] = plain([IMAGE] * (IMAGES // 2))
    variants["call per segment"] = one_call_each(engine, rank)
    return medians_s(variants, repeats)


def one_call_each(engine: CoalescedAttentionEngine, rank: int) -> Variant:
    """The Ulysses images again, an engine call for each: what coalescing saves."""
    runs = [planned(engine, rank, [PlacementOption(SPLITS["ulysses"], (0, 1))], IMAGE) for _ in range(IMAGES)]

    def run() -> None:
        for one in runs:
            one()

    return run


def measure(rank: int, repeats: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(rank)
    groups = ProcessGroupCache(timedelta(seconds=300))
    groups.prepare([(0, 1)])
    engine = CoalescedAttentionEngine(groups)
    return {
        "long": split_against_whole(rank, engine, repeats),
        "images": images(rank, engine, 5 * repeats),
    }


def figures(of_ranks: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Of the slower rank, as a step waits for it."""
    slower = {
        part: {name: max(rank[part][name] for rank in of_ranks) for name in of_ranks[0][part]}
        for part in of_ranks[0]
    }
    long, image = slower["long"], slower["images"]
    out = {f"split_speedup_{name}": long["whole"] / long[name] for name in SPLITS}
    out["whole_overhead_pct"] = 100 * (long["whole"] / long["plain"] - 1)
    out["whole_images_speedup"] = min(image[name] for name in SPLITS) / image["whole"]
    out["coalesced_speedup"] = image["call per segment"] / image["ulysses"]
    out["single_rank_overhead_pct"] = 100 * (image["whole"] / image["plain"] - 1)
    return {name: round(value, 3) for name, value in out.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    repeats = 3 if arguments.quick else 9
    results: dict[str, Any] = figures(run_on_ranks(measure, 2, repeats))
    print(json.dumps({**machine(), "repeats": repeats, **results}, indent=2))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
