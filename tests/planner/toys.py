"""Small worlds for planner tests: easy tables, batches, and exhaustive search that shares no planner code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from zellige_lightning.placement.plan import ParallelConfig, PlacementOption
from zellige_lightning.placement.sequence import Bucket, GlobalBatch
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.cost import MemoryModel, ModelGeometry, ProfileTable
from zellige_lightning.planner.options import legal_configs
from zellige_lightning.planner.planner import BatchPlanner, PlannerConfig, make_planner
from zellige_lightning.planner.problem import Choice, Group, PlacementProblem

HEADS = 12
GEOMETRY = ModelGeometry(
    num_layers=2,
    num_heads=HEADS,
    head_dim=128,
    element_bytes=2,
    resident_bytes_per_token=80_000,
    transient_bytes_per_token=20_000,
    bytes_per_sequence=1_000,
)
MEMORY = MemoryModel(GEOMETRY)

BUCKETS = {
    "i256": Bucket("i256", (1, 16, 16)),
    "i720": Bucket("i720", (1, 45, 80)),
    "v480": Bucket("v480", (41, 30, 52)),
    "v720": Bucket("v720", (41, 45, 80)),
}


def whole_us(num_tokens: int) -> int:
    return max(1, num_tokens // 50 + num_tokens * num_tokens // 100_000)


def table(world: int, buckets: Mapping[str, Bucket] = BUCKETS, fixed_us: int = 500) -> ProfileTable:
    """Splitting costs 2 % and 30 us."""
    prices = {}
    for bucket in buckets.values():
        for config in legal_configs(HEADS, world):
            price = whole_us(bucket.num_tokens)
            if config.degree > 1:
                price = -(-price * 102 // (100 * config.degree)) + 30
            prices[bucket.name, config, "node"] = price
    return ProfileTable(tuple(buckets.values()), prices, {}, fixed_us, {"model": "toy", "world": world})


def batch(counts: Mapping[str, int], step: int = 3) -> GlobalBatch:
    names = [name for name, count in counts.items() for _ in range(count)]
    return GlobalBatch.of(step, 0, ((f"{name}/{i}", BUCKETS[name]) for i, name in enumerate(names)))


def planner(world: int, cap_mib: int = 60_000, **settings: object) -> BatchPlanner:
    """Algorithm 1 unless `name` says otherwise."""
    config = PlannerConfig.of({"name": "paper"} | settings)
    return make_planner(config, table(world), MEMORY, Topology.uniform(world), HEADS, cap_mib)


def choice(
    degree: int, price_us: int, memory_mib: int, world: int, sets: list[tuple[int, ...]] | None = None
) -> Choice:
    """A Ulysses choice on consecutive aligned ranks, or on `sets`."""
    starts = range(0, world - degree + 1, degree)
    rank_sets = tuple(sets or [tuple(range(s, s + degree)) for s in starts])
    return Choice(ParallelConfig(1, degree, 1), price_us, memory_mib, rank_sets)


def problem(world: int, cap_mib: int, *groups: tuple[int, list[Choice]]) -> PlacementProblem:
    """Groups as (count, choices)."""
    made, start = [], 0
    for number, (count, choices) in enumerate(groups):
        made.append(Group(f"g{number}", tuple(range(start, start + count)), tuple(choices)))
        start += count
    return PlacementProblem(world, cap_mib, tuple(made))


def every_placement(problem: PlacementProblem) -> Iterator[tuple[list[int], list[int], int]]:
    """(loads, memory, number of splits) of every combination of options, one sequence at a time."""
    menus = []
    for group in problem.groups:
        options = [(c, ranks) for c in group.choices for ranks in c.rank_sets]
        menus += [options] * len(group)
    for combination in product(*menus):
        loads, memory, splits = [0] * problem.world_size, [0] * problem.world_size, 0
        for chosen, ranks in combination:
            splits += len(ranks) > 1
            for rank in ranks:
                loads[rank] += chosen.price_us
                memory[rank] += chosen.memory_mib
        yield loads, memory, splits


def brute_force(problem: PlacementProblem, epsilon: float) -> tuple[int, int] | None:
    """(least makespan, fewest splits within (1 + epsilon) of it), or None where nothing fits."""
    fitting = [(max(ls), k) for ls, hs, k in every_placement(problem) if max(hs) <= problem.cap_mib]
    if not fitting:
        return None
    best = min(makespan for makespan, _ in fitting)
    return best, min(k for makespan, k in fitting if makespan <= best + int(best * epsilon))


def option(degree: int, *ranks: int) -> PlacementOption:
    return PlacementOption(ParallelConfig(1, degree, 1), ranks)
