"""Placements where blocks cost something to start, beside the prices of their sequences.

A search adds up prices, so it knows the start of a block either not at all, which makes the first sequence of
a call too cheap, or as part of every price, which makes all but the first too dear. It is asked both, the
answers are settled by what they really cost, and the better one stays. What was proven without starts holds
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.problem import Cell, Choice, PlacementProblem, RankSet
from zellige_lightning.planner.sand import relieve_ranks
from zellige_lightning.planner.solution import Account, Solution, num_splits

Block = tuple[ParallelConfig, RankSet]
Search = Callable[[PlacementProblem], Solution]


def has_starts(problem: PlacementProblem) -> bool:
    return any(choice.start_us for group in problem.groups for choice in group.choices)


def search_with_starts(problem: PlacementProblem, epsilon: float, search: Search) -> Solution:
    """The better of two placements that `search` finds, see above, with what it proved without starts.
    Starts below `epsilon` of the makespan change nothing.

    Raises:
        PlanningError: as `search`.
    """
    proven = search(_priced(problem, lambda choice: choice.price_us))
    started = _started(problem, proven.cells, epsilon)
    if not started:
        return proven
    found = [_settled(problem, proven.cells, proven.bound_us, epsilon)]
    with suppress(PlanningError):  # dearer prices may mislead it where memory is tight
        other = search(_priced(problem, lambda choice: choice.price_us + choice.start_us))
        found.append(_settled(problem, other.cells, proven.bound_us, epsilon))
    makespans = [Account(problem, cells).makespan_us for cells in found]
    limit = min(makespans) * (1.0 + epsilon)
    near = [cells for cells, makespan in zip(found, makespans, strict=True) if makespan <= limit]
    return replace(proven, cells=min(near, key=num_splits))


def _priced(problem: PlacementProblem, price_us: Callable[[Choice], int]) -> PlacementProblem:
    """The problem without starts."""

    def priced(choice: Choice) -> Choice:
        more = price_us(choice) - choice.price_us
        nominal = choice.nominal_us and choice.nominal_us + more
        return replace(choice, price_us=choice.price_us + more, nominal_us=nominal, start_us=0)

    groups = (replace(g, choices=tuple(map(priced, g.choices))) for g in problem.groups)
    return replace(problem, groups=tuple(groups))


def _started(problem: PlacementProblem, cells: Iterable[Cell], epsilon: float) -> list[Block]:
    """Blocks whose start matters, those with the least work first."""
    account = Account(problem, cells)
    work: dict[Block, int] = {}
    for key, count in account.counts.items():
        choice = account.choice(key)
        if choice.start_us > epsilon * account.makespan_us:
            block = choice.config, key[2]
            work[block] = work.get(block, 0) + count * choice.price_us
    return sorted(work, key=lambda block: (work[block], block))


def _settled(
    problem: PlacementProblem, cells: tuple[Cell, ...], bound_us: int, epsilon: float
) -> tuple[Cell, ...]:
    """The placement with loads evened out behind the starts, and without the blocks whose sequences take
    less time whole."""
    cells = _evened(problem, cells, bound_us)
    for block in _started(problem, cells, epsilon):
        other = _without(problem, cells, block)
        other = _evened(problem, other, bound_us) if other else cells
        if _makespan(problem, other) <= _makespan(problem, cells):
            cells = other
    return cells


def _makespan(problem: PlacementProblem, cells: Iterable[Cell]) -> int:
    return Account(problem, cells).makespan_us


def _evened(problem: PlacementProblem, cells: tuple[Cell, ...], bound_us: int) -> tuple[Cell, ...]:
    everywhere = [len(group.whole_by_rank()) == problem.world_size for group in problem.groups]
    movable = tuple(g for g, anywhere in enumerate(everywhere) if anywhere)
    return relieve_ranks(problem, cells, movable, bound_us)


def _without(problem: PlacementProblem, cells: tuple[Cell, ...], block: Block) -> tuple[Cell, ...]:
    """The sequences of a block whole, dearest first, each on the rank that is done with it first; empty where
    one does not fit whole or would take longer than all have."""
    account = Account(problem, cells)
    keys = [key for key in account.counts if (account.choice(key).config, key[2]) == block]
    wholes = [problem.groups[key[0]].whole for key in keys]
    if any(whole is None or whole.price_us > account.makespan_us for whole in wholes):
        return ()
    for key in sorted(keys, key=lambda key: (-account.choice(key).price_us, key)):
        count = account.counts[key]
        account.add(key, -count)
        group = problem.groups[key[0]]
        for _ in range(count):
            options = [
                (account.loads_us[rank] + group.choices[j].price_us, rank, j)
                for rank, j in group.whole_by_rank().items()
                if account.memory_mib[rank] + group.choices[j].memory_mib <= problem.cap_mib
            ]
            if not options:
                return ()
            _, rank, j = min(options)
            account.add((key[0], j, (rank,)), 1)
    return account.cells
