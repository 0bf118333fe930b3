"""AdaptiveLoad: whole sequences, balanced by an estimate of their compute (paper, Sec. II-C; arXiv
2605.17923)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement.plan import WHOLE
from zellige_lightning.planner.policies.ledger import Ledger, require_whole
from zellige_lightning.planner.policies.menu import policy_problem
from zellige_lightning.planner.problem import PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution


def solve_adaptive_load(problem: PlacementProblem, brief: Brief) -> Solution:
    """The fixed-batch form: dearest sequence first, to the rank with the least estimated time whose memory
    stays under the cap; if none has room, to the one with the least memory.

    Raises:
        PlanningError: the placement would run out of memory.
    """
    known = policy_problem(problem)
    ledger = Ledger(known)
    work = [known.workload.of(group.num_tokens) for group in known.groups]
    estimated = [0.0] * known.world_size
    for g in sorted(range(len(known.groups)), key=lambda g: (-work[g], g)):
        choice = require_whole(known, g, brief)
        for _ in known.groups[g].members:
            ranks = [r for r in range(known.world_size) if ledger.fits_on(choice, (r,))]
            if ranks:
                rank = min(ranks, key=lambda r: (estimated[r], r))
            else:
                rank = min(range(known.world_size), key=lambda r: (ledger.memory_mib[r], r))
            ledger.add(g, WHOLE, (rank,))
            estimated[rank] += work[g]
    return ledger.solution(brief)


def fit_exponent(lengths: Sequence[int], prices_us: Sequence[int]) -> float:
    """The sampler form's p: slope of log price over log length, by least squares.

    Args:
        lengths, prices_us: of the catalog's buckets, whole.

    Raises:
        ConfigError: fewer than two lengths, which have no slope.
    """
    if len(set(lengths)) < 2:
        raise ConfigError(
            "AdaptiveLoad's exponent needs two buckets of different lengths",
            fix="add a bucket to the catalog",
        )
    xs, ys = [math.log(x) for x in lengths], [math.log(y) for y in prices_us]
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in zip(xs, ys, strict=True)) / sum((x - x0) ** 2 for x in xs)


def batch_sizes(lengths: Sequence[int], exponent: float, memory_tokens: int) -> list[int]:
    """The sampler form: how many sequences of each length a rank draws at once.

    B(S) = max(1, min(M_mem / S, M_comp / S^p)), with M_comp the compute of the longest bucket at B = 1.

    Args:
        exponent: p.
        memory_tokens: M_mem, most tokens that fit on one rank.
    """
    longest = max(lengths)
    # The quotient of lengths first: exact where lengths are multiples of each other.
    return [max(1, min(memory_tokens // s, math.floor((longest / s) ** exponent + 1e-9))) for s in lengths]
