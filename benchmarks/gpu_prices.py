"""What a whole sequence costs on this GPU: forward, recomputation and backward of one Wan2.1-1.3B layer for
the paper's buckets, and from it a price table that `ProfileTable.from_json` reads.

Buckets come in ascending order. One that does not fit, or that would not end in time, is left out and says
so; its whole price in the table is then extrapolated, as the profiler does.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch
from gpu_common import Setup, elapsed_ms, free_bytes, rounded
from gpu_layer import PackedLayer

from zellige_lightning.placement import Bucket, ParallelConfig
from zellige_lightning.planner import ProfileTable
from zellige_lightning.recipes.wan21.flops import executed_layer_flops
from zellige_lightning.simulator.constants import LATENT_FRAMES, ROWS_COLUMNS, image, video

PACK_TOKENS = 16_384  # images are timed several at a time, as they run
SMALLEST = Bucket("fixed", (1, 1, 2))


def paper_buckets(setup: Setup) -> list[Bucket]:
    """By tokens."""
    if setup.tiny:
        return [Bucket("image-tiny", (1, 4, 4)), Bucket("video-tiny", (3, 4, 6))]
    videos = [video(name, s) for s in LATENT_FRAMES for name in ROWS_COLUMNS if name != "256p"]
    return sorted([*map(image, ROWS_COLUMNS), *videos], key=lambda bucket: bucket.num_tokens)


def check(setup: Setup) -> None:
    layer = PackedLayer(setup)
    fixed = measured(layer, [SMALLEST], setup.repeats)
    setup.record({"bucket": "fixed", "tokens": 2, "ms": rounded(fixed["ms"])})
    pace = Pace()
    prices_ms: dict[Bucket, float] = {}
    buckets = paper_buckets(setup)
    for bucket in buckets:
        row = priced(layer, bucket, pace, fixed["ms"])
        if "ms" in row:
            prices_ms[bucket] = row["ms"]
        setup.record(row)
    if prices_ms:
        table = price_table(setup, buckets, prices_ms, fixed["ms"])
        setup.record({"profile": json.loads(table.to_json())})


class Pace:
    """What was seen so far, to foresee the next: seconds per operation and bytes per token."""

    def __init__(self) -> None:
        self.s_per_flop = self.bytes_per_token = 0.0

    def note(self, seconds: float, flops: int, peak: int, tokens: int) -> None:
        self.s_per_flop = seconds / flops
        self.bytes_per_token = max(peak / tokens, 0.9 * self.bytes_per_token)


def priced(layer: PackedLayer, bucket: Bucket, pace: Pace, fixed_ms: float) -> dict[str, Any]:
    """The row of a bucket; without `ms` where it was left out."""
    setup, config = layer.setup, layer.config
    copies = max(1, PACK_TOKENS // bucket.num_tokens) if not setup.tiny else 2
    flops = copies * executed_layer_flops(config, bucket.num_tokens)
    row: dict[str, Any] = {"bucket": bucket.name, "tokens": bucket.num_tokens, "copies": copies}
    needed, free = 1.1 * pace.bytes_per_token * bucket.num_tokens * copies, free_bytes(setup.device)
    if needed > free:
        return row | {"left_out": f"would take about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} are free"}
    seconds = pace.s_per_flop * flops
    if 1.3 * seconds > setup.remaining_s - 2.0:
        return row | {"left_out": f"would take about {seconds:.0f} s, {setup.remaining_s:.0f} s are left"}
    # Long runs need neither a warm-up nor a median: one is what the time allows.
    repeats = min(setup.repeats, int(0.2 * setup.remaining_s / max(seconds, 1e-3)) - 1)
    try:
        seen = measured(layer, [bucket] * copies, max(0, repeats))
    except torch.OutOfMemoryError:
        seen = None
    if seen is None:  # only now has the exception let go of the tensors
        torch.cuda.empty_cache()
        return row | {"left_out": "out of memory"}
    pace.note(seen["ms"] / 1e3, flops, int(seen["peak"]), copies * bucket.num_tokens)
    return row | {
        "repeats": max(1, repeats),
        "ms": rounded(max(1e-3, seen["ms"] - fixed_ms) / copies),
        "tflops": rounded(flops / seen["ms"] / 1e9),
        "peak_gib": rounded(seen["peak"] / 2**30, 3),
    }


def measured(layer: PackedLayer, buckets: list[Bucket], repeats: int) -> dict[str, float]:
    """Median of a step in ms after a warm-up, or the only run where `repeats` is 0; peak bytes on top."""
    device = layer.setup.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    base = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    inputs = layer.inputs(buckets)
    times = [elapsed_ms(lambda: layer.step(inputs), device) for _ in range(1 + repeats)]
    peak = torch.cuda.max_memory_allocated(device) - base if device.type == "cuda" else 0
    return {"ms": statistics.median(times[1:] or times), "peak": peak}


def price_table(
    setup: Setup, buckets: list[Bucket], prices_ms: dict[Bucket, float], fixed_ms: float
) -> ProfileTable:
    """Of the whole model: a layer's times by the number of layers. Embeddings and head are not in it."""
    layers, whole = setup.config.num_layers, ParallelConfig()
    prices = {
        (bucket.name, whole, "node"): max(1, round(1e3 * layers * ms)) for bucket, ms in prices_ms.items()
    }
    fingerprint: dict[str, str | int | float] = {
        "device": torch.cuda.get_device_name(setup.device) if setup.is_gpu else "cpu (rehearsal)",
        "torch": torch.__version__,
        "model": setup.model_name,
        "layers": layers,
        "precision": "bf16-mixed",
        "source": "gpu_check: one checkpointed layer times the number of layers",
    }
    fitting = ProfileTable(tuple(prices_ms), prices, {}, 0, {})
    rest = {b.name: fitting.whole_us(b) for b in buckets if b not in prices_ms}
    return ProfileTable(tuple(buckets), prices, rest, round(1e3 * layers * fixed_ms), fingerprint)
