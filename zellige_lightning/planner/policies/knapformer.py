"""KnapFormer: preconfigured disjoint Ulysses groups ("bags") and greedy routing by estimated compute
(paper, Sec. II-C).

Its `SequenceBalancer`, with the memory constraint that the paper adds. A bag may stay empty; then its ranks
idle.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence

from zellige_lightning.errors import ConfigError, PlanningError
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.policies.groups import RankGroup, consecutive
from zellige_lightning.planner.policies.ledger import Ledger, no_option
from zellige_lightning.planner.policies.menu import PolicyProblem, policy_problem
from zellige_lightning.planner.problem import PlacementProblem
from zellige_lightning.planner.solution import Brief, Solution

Sizes = tuple[int, ...]
Counts = list[int]  # sequences of each group of the problem


def solve_knapformer(problem: PlacementProblem, brief: Brief) -> Solution:
    """The layout of `planner.layout`, such as `g1n2+g2n1+g4n1`; `auto` takes the best one under the memory
    cap.

    Raises:
        ConfigError: a layout that cannot be read, or that the world or the heads do not allow.
        PlanningError: the layout's placement would run out of memory or lacks a price; `auto`: every one's.
    """
    known = policy_problem(problem)
    if brief.config.layout != "auto":
        sizes = parse_layout(brief.config.layout, known.world_size, known.num_heads)
        return _required(known, sizes, brief).solution(brief)
    feasible = all_layouts(known)
    if not feasible:
        raise PlanningError(
            f"knapformer: none of the layouts of {known.world_size} ranks is priced and fits under "
            f"{known.cap_mib} MiB",
            fix="set planner.family=contiguous, or raise planner.memory_cap_gib",
            step=brief.step,
        )
    return min(feasible, key=lambda row: row[1].makespan_us)[1].solution(brief)


def all_layouts(problem: PolicyProblem) -> list[tuple[Sizes, Ledger]]:
    """Every layout that fits under the cap, with its placement."""
    degrees = [d for d in range(1, problem.world_size + 1) if problem.num_heads % d == 0]
    found = []
    for sizes in partitions(problem.world_size, degrees):
        ledger = place(problem, sizes)
        if ledger is not None and ledger.fits:
            found.append((sizes, ledger))
    return found


def partitions(total: int, parts: Sequence[int]) -> Iterator[Sizes]:
    """Multisets of `parts` that add up to `total`, each ascending."""
    if total == 0:
        yield ()
        return
    for i, part in enumerate(parts):
        if part <= total:
            yield from ((part, *rest) for rest in partitions(total - part, parts[i:]))


def parse_layout(text: str, world_size: int, num_heads: int) -> Sizes:
    """Bag sizes, ascending, of one replica.

    Raises:
        ConfigError: what is wrong with it.
    """
    terms = [re.fullmatch(r"g([1-9]\d*)n([1-9]\d*)", term.strip()) for term in text.split("+")]
    rows = sorted((int(m[1]), int(m[2])) for m in terms if m is not None)
    if len(rows) != len(terms):
        raise _wrong(
            text, "is no layout", "write `auto`, or such as g1n4+g4n1: four bags of one rank, one of four"
        )
    if len({size for size, _ in rows}) != len(rows):
        raise _wrong(text, "names a bag size twice", "give each size once, with its count")
    for size, _ in rows:
        if num_heads % size:
            legal = [d for d in range(1, num_heads + 1) if num_heads % d == 0]
            raise _wrong(
                text, f"has bags of {size} ranks, which do not divide {num_heads} heads", f"legal are {legal}"
            )
    total = sum(size * count for size, count in rows)
    if world_size % total:
        raise _wrong(
            text, f"covers {total} ranks, which do not divide the world of {world_size}", "change the counts"
        )
    return tuple(size for size, count in rows for _ in range(count))


def _wrong(text: str, what: str, fix: str) -> ConfigError:
    return ConfigError(f"planner.layout = {text!r} {what}", fix=fix)


def layout_name(sizes: Sizes) -> str:
    """KnapFormer's own notation."""
    return "+".join(f"g{size}n{sizes.count(size)}" for size in sorted(set(sizes)))


def _required(problem: PolicyProblem, sizes: Sizes, brief: Brief) -> Ledger:
    ledger = place(problem, sizes)
    if ledger is not None:
        return ledger
    raise no_option(problem, 0, f"complete placement in layout {layout_name(sizes)}", brief)


def place(problem: PolicyProblem, sizes: Sizes) -> Ledger | None:
    """The balancer's assignment; None where a sequence has no option in the bag that it is routed to.

    A world of several times the layout's ranks is that many replicas, dealt the sequences in turn: nothing
    is balanced between them.
    """
    total = sum(sizes)
    replicas = problem.world_size // total
    ledger, dealt = Ledger(problem), 0
    shares: list[Counts] = [[0] * len(problem.groups) for _ in range(replicas)]
    for g, group in enumerate(problem.groups):
        for _ in group.members:
            shares[dealt % replicas][g] += 1
            dealt += 1
    for replica, counts in enumerate(shares):
        bags = consecutive(sizes, lambda size: ParallelConfig(1, size, 1), first=replica * total)
        if not _route(problem, bags, counts, ledger):
            return None
    return ledger


def _route(problem: PolicyProblem, bags: list[RankGroup], counts: Counts, ledger: Ledger) -> bool:
    """Heaviest first, to the relatively emptiest of the bags whose full capacity holds it."""
    work = [problem.workload.of(group.num_tokens) for group in problem.groups]
    fair = sum(n * w for n, w in zip(counts, work, strict=True)) / sum(len(bag.ranks) for bag in bags)
    capacity = [fair * len(bag.ranks) for bag in bags]
    occupancy = [0.0] * len(bags)
    for g in sorted(range(len(counts)), key=lambda g: (-work[g], g)):
        if not counts[g]:
            continue
        heap = [(occupancy[j], j) for j in _candidates(bags, capacity, work[g], problem.groups[g].num_tokens)]
        heapq.heapify(heap)
        taken = [0] * len(bags)
        for _ in range(counts[g]):
            j = heap[0][1]
            taken[j] += 1
            occupancy[j] += work[g] / capacity[j]
            heapq.heapreplace(heap, (occupancy[j], j))
        for j, count in enumerate(taken):
            if count and problem.find(g, bags[j].config, bags[j].ranks) is None:
                return False
            if count:
                ledger.add(g, bags[j].config, bags[j].ranks, count)
    return True


def _candidates(bags: list[RankGroup], capacity: list[float], work: float, num_tokens: int) -> list[int]:
    """Bags that could hold the sequence if they were empty; else all of the largest size."""
    slack = work * (1 - 1e-12)  # one sequence alone has exactly the capacity of the bag that is the world
    found = [j for j, bag in enumerate(bags) if capacity[j] >= slack and num_tokens >= len(bag.ranks)]
    largest = max(len(bag.ranks) for bag in bags)
    return found or [j for j, bag in enumerate(bags) if len(bag.ranks) == largest]
