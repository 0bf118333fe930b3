"""Do no harm: a plan is changed, or made more complicated, only where the predicted gain exceeds the noise.

Candidates for a batch are the planner's solution, the previous plan where its batch had the same bucket
counts, and all sequences whole.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import ParallelConfig, Plan
from zellige_lightning.placement.sequence import GlobalBatch, digest63
from zellige_lightning.planner.problem import Cell, PlacementProblem, RankSet
from zellige_lightning.planner.solution import Solution, num_splits, sums

Placed = tuple[str, ParallelConfig, RankSet, int]  # bucket, configuration, rank set, number of sequences
KEPT = ("KEPT", "KEPT")  # statuses of a plan that is not the planner's own


@dataclass(frozen=True)
class Precedent:
    """Where the last global batch was placed, as counts: what a next plan may depend on.

    Args:
        waves: one sorted tuple of counts per wave.
    """

    waves: tuple[tuple[Placed, ...], ...] = ()

    @classmethod
    def of(cls, planned: Iterable[tuple[GlobalBatch, Plan]]) -> Precedent:
        """From the waves of a step."""
        return cls(tuple(tuple(sorted(_counts(batch, plan))) for batch, plan in planned))

    @cached_property
    def digest(self) -> int:
        """63 bits; what a checkpoint and the ranks compare."""
        return digest63(self.to_json())

    def to_json(self) -> str:
        rows = [[[n, [c.q, c.h, c.k], list(r), k] for n, c, r, k in wave] for wave in self.waves]
        return json.dumps(rows)

    @classmethod
    def from_json(cls, text: str) -> Precedent:
        """Raises: PlanningError for anything that is not a precedent."""
        try:
            waves = tuple(tuple(_placed(*row) for row in wave) for wave in json.loads(text))
        except (ValueError, TypeError) as error:
            raise PlanningError(
                f"a previous plan that is none: {text[:80]!r}", fix="resume from another checkpoint"
            ) from error
        return cls(waves)

    def cells(self, problem: PlacementProblem) -> tuple[Cell, ...]:
        """A wave with the problem's bucket counts as cells of the problem; empty where there is none, or
        where a placement is no option any more."""
        wanted = {group.bucket: len(group) for group in problem.groups}
        if len(wanted) < len(problem.groups):  # two shapes of one name
            return ()
        for wave in self.waves:
            counts: Counter[str] = Counter()
            for name, _, _, count in wave:
                counts[name] += count
            if counts == wanted and (cells := _as_cells(problem, wave)):
                return cells
        return ()


def _counts(batch: GlobalBatch, plan: Plan) -> list[Placed]:
    counts: Counter[tuple[str, ParallelConfig, RankSet]] = Counter(
        (s.bucket.name, o.config, o.ranks) for s, o in zip(batch.sequences, plan.options, strict=True)
    )
    return [(*key, count) for key, count in counts.items()]


def _placed(name: Any, config: Any, ranks: Any, count: Any) -> Placed:
    if (
        not isinstance(name, str)
        or not all(isinstance(n, int) for n in (*config, *ranks, count))
        or count < 1
    ):
        raise ValueError("a placement has a name, integers, and a count")
    return name, ParallelConfig(*config), tuple(ranks), count


def _as_cells(problem: PlacementProblem, wave: Sequence[Placed]) -> tuple[Cell, ...]:
    places = {group.bucket: g for g, group in enumerate(problem.groups)}
    cells = []
    for name, config, ranks, count in wave:
        g = places[name]
        options = enumerate(problem.groups[g].choices)
        j = next((j for j, c in options if c.config == config and ranks in c.rank_sets), None)
        if j is None:
            return ()
        cells.append(Cell(g, j, ranks, count))
    return tuple(sorted(cells))


def simplest(
    problem: PlacementProblem,
    solution: Solution,
    wholes: tuple[Cell, ...],
    precedent: Precedent,
    noise: int,
) -> Solution:
    """Of the candidates within `noise` (per mille) of the solution's makespan the one with the fewest splits,
    the previous plan first among equals. The solution's bound stays: it holds for every placement.

    Args:
        wholes: all sequences whole; empty where that is no candidate.
    """
    if not solution.cells:
        return solution
    best_us = max(sums(problem, solution.cells)[0])
    limit = best_us + best_us * noise // 1000
    candidates = [(precedent.cells(problem), 0), (solution.cells, 1), (wholes, 2)]
    fitting = [(num_splits(c), order, c) for c, order in candidates if c and _fits(problem, c, limit)]
    _, order, cells = min(fitting)
    if order == 1 or cells == solution.cells:
        return solution
    return replace(solution, cells=cells, statuses=KEPT, split_bound=0)


def _fits(problem: PlacementProblem, cells: Iterable[Cell], limit: int) -> bool:
    loads, memory = sums(problem, cells)
    return max(loads) <= limit and max(memory) <= problem.cap_mib
