"""The attention engine against its alternatives, in one run on this machine: `python benchmarks/engine.py`.

Two processes, each pinned to a core. Every comparison interleaves its variants and takes medians, so that
what else the machine does hits all alike. Ratios above 1 say that the engine's way is faster. The bytes of
the paper's V50 workload are modeled: counted from plans, without processes.
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
from torch._dynamo.testing import CompileCounterWithBackend

from zellige_lightning.engine import CoalescedAttentionEngine, ProcessGroupCache, checkpoint
from zellige_lightning.placement import ParallelConfig, PlacementOption, build_schedule, whole
from zellige_lightning.placement.schedule import padded
from zellige_lightning.simulator.suites import v50_bytes

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


def overlap(rank: int, engine: CoalescedAttentionEngine, repeats: int) -> dict[str, float]:
    """A split sequence next to whole images, which can run while its exchanges are in flight."""
    options = [PlacementOption(SPLITS["ulysses"], (0, 1))] + [whole(i % 2) for i in range(IMAGES)]
    lengths = [LONG // 2] + [IMAGE] * IMAGES
    schedule = build_schedule(options, lengths, rank, 2)
    inputs = random_qkv(schedule.num_tokens)

    def variant(on: bool) -> Variant:
        def run() -> None:
            engine.overlap = on
            engine.install(schedule)
            engine(*inputs).sum().backward()
            engine.overlap = True

        return run

    return medians_s({"on": variant(True), "off": variant(False)}, repeats)


def kept_forwards(rank: int, engine: CoalescedAttentionEngine) -> dict[str, float]:
    """Attention forwards of a checkpointed step with attention kept and without, counted."""
    counts = {}
    schedule = build_schedule(
        [PlacementOption(SPLITS["ring"], (0, 1)), whole(0), whole(1)], [512] * 3, rank, 2
    )
    x = random_qkv(schedule.num_tokens)[0]
    for name, kept in (("none", frozenset()), ("all", frozenset(range(3)))):
        engine.install(schedule, kept)
        engine.counters.reset()
        checkpoint(lambda y: engine(y, y, y), x, engine=engine).sum().backward()
        counts[name] = float(engine.counters.kernel_calls["forward"])
    return counts


def compiled_graphs(rank: int, engine: CoalescedAttentionEngine) -> dict[str, float]:
    """Graphs of a compiled call over plans of many shapes, ranks with 0 and 1 tokens among them."""
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda q, k, v: engine(q, k, v) * 2.0, backend=counter, fullgraph=True, dynamic=True)
    split = PlacementOption(SPLITS["ulysses"], (0, 1))
    for options, lengths in (
        ([split, whole(0), whole(1)], [100, 30, 40]),
        ([whole(0), whole(0)], [64, 33]),
        ([whole(0), whole(1)], [50, 1]),
        ([split], [3]),
        ([split, split, whole(1)], [7, 90, 12]),
    ):
        schedule = padded(build_schedule(options, lengths, rank, 2))
        engine.install(schedule)
        call(*random_qkv(schedule.num_tokens)).sum().backward()
    return {"graphs": float(counter.frame_count)}


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
        "overlap": overlap(rank, engine, repeats),
        "kept": kept_forwards(rank, engine),
        "compiled": compiled_graphs(rank, engine),
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
    out["overlap_gain_pct"] = 100 * (slower["overlap"]["off"] / slower["overlap"]["on"] - 1)
    out["attn_forwards_saved_ratio"] = slower["kept"]["all"] / slower["kept"]["none"]
    out["max_graphs"] = slower["compiled"]["graphs"]
    v50 = v50_bytes()
    out["v50_bytes_vs_usp"], out["v50_bytes_vs_knapformer"] = v50.vs_usp, v50.vs_knapformer
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
