"""The central promise: loss and every gradient are the same for every placement, and equal plain
single-process training of each sequence alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.invariance.mutations import MUTATIONS
from tests.invariance.reference import Sequence, window_loss
from tests.invariance.subject import Case, draw_parameters, make_module, run_cases
from zellige_lightning.errors import PlanningError
from zellige_lightning.placement import (
    Bucket,
    GlobalBatch,
    ParallelConfig,
    PlacementOption,
    Topology,
    whole,
)
from zellige_lightning.planner import (
    MemoryModel,
    ModelGeometry,
    PlannerConfig,
    ProfileTable,
    legal_configs,
    make_planner,
)
from zellige_lightning.planner.planner import PLANNERS

HEADS = 12
GRIDS = [(1, 1, 1), (1, 2, 2), (1, 4, 4), (1, 3, 5), (3, 2, 2), (3, 4, 4), (5, 3, 3), (3, 6, 10), (1, 1, 7)]
Options = tuple[PlacementOption, ...]


def make_sequence(rng: random.Random, model: str, grid: tuple[int, int, int]) -> Sequence:
    key = f"{model}-{rng.getrandbits(40):x}"
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    tokens = grid[0] * grid[1] * grid[2]
    if model == "user":
        data = {
            "x": torch.randn(tokens, 6, generator=generator, dtype=torch.float64),
            "c": torch.randn(4, generator=generator, dtype=torch.float64),
        }
    else:
        data = {
            "latents": torch.randn(tokens, 64, generator=generator),
            "text": torch.randn(5, 10, generator=generator),
        }
    return {"key": key, "grid": grid, "data": data}


def planned_by(policy: str, world: int, sequences: tuple[Sequence, ...]) -> Options:
    """The plan of a real planner, on a modeled price table in which splitting long sequences pays."""
    buckets = {g: Bucket("x".join(map(str, g)), g) for g in GRIDS}
    configs = legal_configs(HEADS, world)
    prices = {}
    for bucket in buckets.values():
        for config in configs:
            cost = (bucket.num_tokens + bucket.num_tokens**2 // 8) // config.degree
            prices[bucket.name, config, "node"] = cost + 10 + 3 * config.degree * (config.degree > 1)
    table = ProfileTable(tuple(buckets.values()), prices, {}, 0, {})
    memory = MemoryModel(ModelGeometry(2, HEADS, 8, 8, 1000, 1000, 0))
    batch = GlobalBatch.of(0, 0, [(s["key"], buckets[s["grid"]]) for s in sequences])
    topology = Topology.uniform(world)
    planner = make_planner(PlannerConfig(name=policy), table, memory, topology, HEADS, 10_000)
    return planner.plan(batch).options


def placed_at_random(
    rng: random.Random, world: int, sequences: tuple[Sequence, ...], aligned: bool = False
) -> Options:
    """Any legal configuration, on any ranks, so that rank sets overlap in every way, or on aligned sets
    only."""
    configs = [c for c in legal_configs(HEADS, world) if not aligned or world % c.degree == 0]
    options = []
    for config in (rng.choice(configs) for _ in sequences):
        start = rng.randrange(world // config.degree) * config.degree
        drawn = range(start, start + config.degree) if aligned else rng.sample(range(world), config.degree)
        options.append(PlacementOption(config, tuple(sorted(drawn))))
    return tuple(options)


def answers(policy: str, world: int) -> bool:
    """Whether a policy has a placement at all for such worlds: some rivals know no rank that is left over."""
    rng = random.Random(0)
    sequences = tuple(make_sequence(rng, "user", grid) for grid in GRIDS)
    try:
        planned_by(policy, world, sequences)
    except PlanningError:
        return False
    return True


def draw_options(rng: random.Random, name: str, world: int, sequences: tuple[Sequence, ...]) -> Options:
    everybody = tuple(range(world))
    if name in PLANNERS:
        return planned_by(name, world, sequences)
    if name == "whole":
        return tuple(whole(i % world) for i in range(len(sequences)))
    if name == "idle":  # the last rank has nothing to do
        busy = max(1, world - 1)
        pair = PlacementOption(ParallelConfig(1, 1, busy), tuple(range(busy)))
        return tuple(pair if i % 2 else whole(i % busy) for i in range(len(sequences)))
    if name == "random":
        return placed_at_random(rng, world, sequences)
    config = ParallelConfig(*map(int, name))
    return tuple(
        PlacementOption(config, everybody) if i % 3 else whole(i % world) for i in range(len(sequences))
    )


def draw_cases(world: int) -> list[Case]:
    names = ["whole", "idle", "random", "random", *(p for p in PLANNERS if answers(p, world))]
    names += [
        "".join(map(str, (c.q, c.h, c.k))) for c in legal_configs(HEADS, world) if c.degree == world > 1
    ]
    return [draw_case(world, name, i) for i, name in enumerate(names * 2)]


def draw_case(world: int, name: str, i: int) -> Case:
    rng = random.Random(f"{world}-{name}-{i}")
    model = ("user", "wan")[rng.randrange(2)]
    window, options = [], []
    for _ in range(rng.choice((1, 2))):
        grids = [(1, 1, 1), (3, 6, 10), *rng.choices(GRIDS, k=rng.randint(1, 5))]
        rng.shuffle(grids)
        sequences = tuple(make_sequence(rng, model, grid) for grid in grids)
        window.append(sequences)
        options.append(draw_options(rng, name, world, sequences))
    return Case(i, model, name, tuple(window), tuple(options), checkpointing=rng.random() < 0.5)


def reference(case: Case) -> tuple[float, dict[str, torch.Tensor]]:
    module = make_module(case.model)
    parameters = {n: p.requires_grad_() for n, p in draw_parameters(module, case.seed).items()}
    local = {n.removeprefix("dit."): p for n, p in parameters.items()}
    loss = window_loss(local, case.model, [list(batch) for batch in case.window])
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in parameters.items() if p.grad is not None}


def worst_error(case: Case, results: list[dict[str, Any]]) -> float:
    """Largest relative error of loss and gradients; refuses references that say nothing."""
    loss, gradients = reference(case)
    mine = results[0]["gradients"]
    assert set(mine) == set(gradients) and len(gradients) > 20
    errors = [abs(results[0]["loss"] - loss) / abs(loss)]
    for name, expected in gradients.items():
        size = float(expected.abs().max())
        assert size > 1e-5, f"the reference gradient of {name} is only {size}"
        errors.append(float((torch.from_numpy(mine[name]) - expected).abs().max()) / size)
    assert len({result["checksum"] for result in results}) == 1, "ranks disagree on the gradients"
    return max(errors)


@pytest.fixture(scope="module")
def totals() -> Iterator[Counter[str]]:
    seen: Counter[str] = Counter()
    yield seen
    print(f"\nplacement invariance: {dict(seen)}")
    assert seen["pairs"] >= 40 and seen["checkpointed"] >= 10 and seen["accumulated"] >= 10


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_loss_and_gradients_do_not_depend_on_placement(world: int, totals: Counter[str]) -> None:
    cases = draw_cases(world)
    results = run_distributed(run_cases, world, cases)
    exchanges: Counter[str] = Counter()
    for i, case in enumerate(cases):
        of_case = [ranks[i] for ranks in results]
        error = worst_error(case, of_case)
        assert error <= 1e-10, f"{case.name}, {case.model}, {world} ranks: {error}"
        exchanges += sum((r["exchanges"] for r in of_case), Counter())
        totals["pairs"] += len(case.window)
        totals["checkpointed"] += case.checkpointing
        totals["accumulated"] += len(case.window) > 1
    if world > 1:
        kinds = {"all_gather", "reduce_scatter", "ring", "ring_gradient", "ulysses"}
        assert set(exchanges) == kinds, f"only {exchanges} ran"


def test_both_models_meet_every_switch() -> None:
    cases = [case for world in (1, 2, 3, 4) for case in draw_cases(world)]
    met = {(c.model, c.checkpointing, len(c.window)) for c in cases}
    assert met == {(m, c, a) for m in ("user", "wan") for c in (True, False) for a in (1, 2)}
    composed = {o.config for c in cases for options in c.options for o in options}
    assert {(2, 2, 1), (2, 1, 2), (1, 2, 2)} <= {(c.q, c.h, c.k) for c in composed}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_fault_turns_it_red(mutation: str) -> None:
    """A test of the test: with the fault in place some case must be far off."""
    rng = random.Random(7)
    configs = [ParallelConfig(2, 1, 1), ParallelConfig(1, 2, 1), ParallelConfig(1, 1, 2)]
    cases = []
    for i, config in enumerate(configs):
        sequences = tuple(make_sequence(rng, "wan", grid) for grid in ((3, 3, 5), (1, 2, 2)))
        options = (PlacementOption(config, (0, 1)), whole(1))
        cases.append(Case(i, "wan", mutation, (sequences,), (options,), checkpointing=False))
    sound = run_distributed(run_cases, 2, cases)
    broken = run_distributed(run_cases, 2, cases, mutation)
    assert max(worst_error(c, [r[i] for r in sound]) for i, c in enumerate(cases)) <= 1e-10
    assert max(_error(c, [r[i] for r in broken]) for i, c in enumerate(cases)) > 1e-6


def _error(case: Case, results: list[dict[str, Any]]) -> float:
    try:
        return worst_error(case, results)
    except AssertionError:  # ranks that disagree are red as well
        return float("inf")
