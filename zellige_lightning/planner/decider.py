"""Decisions of one problem: the buffers of the search kernel, its answers, and the sand packed behind its
rocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from zellige_lightning.planner.compiled import buffer, zeros
from zellige_lightning.planner.problem import Cell, Choice, Group, PlacementProblem
from zellige_lightning.planner.sand import Sand, conditions
from zellige_lightning.planner.search_kernel import FEASIBLE, INFEASIBLE, UNKNOWN, decide
from zellige_lightning.planner.slack_kernel import place_by_slack
from zellige_lightning.planner.symmetry import block_swaps, twin_classes

MEMO_STATES = 1 << 13
NO_BUDGET = 1 << 40
MOST_SYMMETRIC = 64  # ranks up to which equal states are looked for
LIGHT = 50  # sequences below 1 / LIGHT of the mean load are sand at first
FEW_SPLITS = 4  # numbers of splits to try first, from the forced ones
MOST_PACKINGS = 6  # placements of the rocks that one decision tries to pack with sand, on few ranks
FEW_RANKS = 8
FEW_SEQUENCES, NUM_DUALS = 64, 10  # where they do not divide evenly over ranks, duals prove more than area


@dataclass(frozen=True)
class Attempt:
    """Answer for one target. `makespan_us` and `cells` are set where rocks and sand were placed."""

    status: int
    makespan_us: int | None = None
    cells: tuple[Cell, ...] = ()

    def meets(self, limit: int) -> bool:
        return self.makespan_us is not None and self.makespan_us <= limit

    def better(self, other: Attempt) -> Attempt:
        """The one with the smaller makespan; ties and failures keep this one."""
        if other.makespan_us is None or (
            self.makespan_us is not None and self.makespan_us <= other.makespan_us
        ):
            return self
        return other


@dataclass
class Decider:
    """Buffers of one problem with a chosen set of sand groups; answers decisions.

    Args:
        light: positions in `problem.groups` of the groups that are packed whole after the rocks.
    """

    problem: PlacementProblem
    light: tuple[int, ...]
    nodes: int = 0
    _groups: list[tuple[int, Group, tuple[int, ...]]] = field(default_factory=list)
    _args: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        problem, sand = self.problem, set(self.light)
        self.sand = Sand(problem, self.light)
        world = problem.world_size
        # choices by increasing area: the first one tried wastes the least
        self._groups = [
            (g, group, tuple(sorted(range(len(group.choices)), key=lambda j: _thrift(group.choices[j]))))
            for g, group in enumerate(problem.groups)
        ]
        heaviest_first = sorted(
            range(len(problem.groups)), key=lambda g: (-_least_area(problem.groups[g]), g)
        )
        items = [g for g in heaviest_first if g not in sand for _ in problem.groups[g].members]
        choices = [group.choices[j] for _, group, order in self._groups for j in order]
        sets = [(j, ranks) for j, choice in enumerate(choices) for ranks in choice.rank_sets]
        families = {choice.rank_sets for choice in choices}
        symmetric = world <= MOST_SYMMETRIC
        twins = twin_classes(world, families) if symmetric else tuple(range(world))
        swaps = block_swaps(world, families) if symmetric else ()
        memo = MEMO_STATES if symmetric else 1
        ratios = conditions(self.sand.weights)
        width = max((len(c.rank_sets) for c in choices), default=1)
        self.sizes = (
            world,
            len(items),
            len(problem.groups),
            len(ratios),
            len(swaps),
            MEMO_STATES,
            width,
            int(symmetric),
            NUM_DUALS if problem.num_sequences <= FEW_SEQUENCES else 0,
        )
        num_q = len(ratios)
        starts = [0]
        for _, group, _ in self._groups:
            starts.append(starts[-1] + len(group.choices))
        set_ptr, set_ranks = [0], [0]
        for choice in choices:
            set_ptr.append(set_ptr[-1] + len(choice.rank_sets))
        for _, ranks in sets:
            set_ranks.append(set_ranks[-1] + len(ranks))
        self.loads, self.mems, self.picks = zeros(world), zeros(world), zeros(len(items) + 1)
        self.items, self.choices, self.sets, self.starts = items, choices, sets, starts
        self.stamps, self._forced, self._room = zeros(4), zeros(len(items) + 1), zeros(2 * len(ratios))
        self._args = [
            buffer(self.sizes),
            buffer(items or [0]),
            buffer(len(group) if g in sand else 0 for g, group, _ in self._groups),
            buffer(starts),
            buffer(c.config.degree for c in choices),
            buffer(c.price_us for c in choices),
            buffer(c.work_us for c in choices),
            buffer(c.memory_mib for c in choices),
            buffer(set_ptr),
            buffer(j for j, _ in sets),
            buffer(set_ranks),
            buffer(r for _, ranks in sets for r in ranks),
            buffer(problem.slowness_by_rank),
            buffer(twins),
            buffer([x for swap in swaps for x in swap] or [0]),
            buffer(x for pair in ratios for x in pair),
            zeros(len(problem.groups) * (num_q + 2)),
            zeros((len(items) + 1) * num_q),
            self._forced,
            zeros(len(items) + 1),
            self.loads,
            self.mems,
            self.picks,
            zeros(3 * (len(items) + 1)),
            zeros((len(items) + 1) * self.sizes[6]),
            zeros((len(items) + 1) * self.sizes[6]),
            zeros(world),
            zeros(3 + 2 * world),
            zeros(4 * memo),
            zeros(memo * (3 + 2 * world)),
            self.stamps,
            zeros(self.sizes[8] * len(choices) + 1),
            zeros(self.sizes[8] * (len(items) + 1) + len(problem.groups)),
            zeros(self.sizes[8] + 1),
        ]

    def decide(
        self, limit: int, budget: int, node_limit: int, spread: bool = False, resume: bool = False
    ) -> int:
        """The kernel's answer for the rocks (sand only through its conditions)."""
        before = int(self.stamps[2]) if resume else 0
        status: int = decide(
            limit, budget, self.problem.cap_mib, node_limit, int(resume), int(spread), *self._args
        )
        self.nodes += int(self.stamps[2]) - before
        return status

    def attempt(self, limit: int, budget: int, node_limit: int) -> Attempt:
        """Decides, and where the rocks fit, packs the sand and repairs its packing towards `limit`.

        Rocks are placed by slack first, which wastes nothing that lies ahead; then spread, which leaves
        every rank room for sand; where that gets lost, with few splits, which leaves less to try; then
        packed tightly, which finds the placements that need it. INFEASIBLE is a proof, whatever the order.
        """
        best = Attempt(UNKNOWN)
        if budget == NO_BUDGET and self._by_slack(limit) and self.sand.pack(limit, self.loads, self.mems):
            best = self._packed()
            if best.meets(limit):
                return best
        spread = self._attempt(limit, budget, node_limit // 4, True)
        best = best.better(spread)
        if spread.status == INFEASIBLE or best.meets(limit):
            return spread if spread.status == INFEASIBLE else best
        fewest = int(self._forced[0])
        for few in range(fewest, min(fewest + FEW_SPLITS, budget)):
            best = best.better(self._attempt(limit, few, node_limit // 8, True))
            if best.meets(limit):
                return best
        tight = self._attempt(limit, budget, node_limit, False)
        return tight if tight.status == INFEASIBLE else best.better(tight)

    def _attempt(self, limit: int, budget: int, node_limit: int, spread: bool) -> Attempt:
        status = self.decide(limit, budget, node_limit, spread)
        best = Attempt(INFEASIBLE if status == INFEASIBLE else UNKNOWN)
        for _ in range(MOST_PACKINGS if self.problem.world_size <= FEW_RANKS else 1):
            if status != FEASIBLE:
                break
            packed = self.sand.pack(limit, self.loads, self.mems)
            if packed:
                best = best.better(self._packed())
            if best.meets(limit):
                break
            status = self.decide(limit, budget, node_limit, spread, resume=True)
        return best

    def _packed(self) -> Attempt:
        cells = tuple(sorted([*self._rocks(), *self.sand.cells()]))
        return Attempt(FEASIBLE, self.sand.makespan_us, cells)

    def _by_slack(self, limit: int) -> bool:
        """Places the rocks greedily; see `slack_kernel`."""
        tables, results = self._args[:13], self._args[15:23]  # but for the symmetries
        given = *tables, *results, self._room
        placed: bool = place_by_slack(limit, self.problem.cap_mib, *given)
        self.nodes += len(self.items)
        return placed and bool(self.items)

    def _rocks(self) -> list[Cell]:
        """The rocks that the last decision placed."""
        counts: dict[tuple[int, int, tuple[int, ...]], int] = {}
        for i, g in enumerate(self.items):
            j, ranks = self.sets[int(self.picks[i])]
            key = g, self._groups[g][2][j - self.starts[g]], ranks
            counts[key] = counts.get(key, 0) + 1
        return [Cell(*key, count) for key, count in counts.items()]


def _least_area(group: Group) -> int:
    return min(c.area_us for c in group.choices)


def _thrift(choice: Choice) -> tuple[int, int, int]:
    return choice.area_us, choice.config.degree, choice.memory_mib


def light_groups(problem: PlacementProblem, max_rocks: int) -> tuple[int, ...]:
    """Groups to treat as sand, dearest first: those below 2 % of the mean load each that fit whole, and
    whatever lies beyond `max_rocks` rocks."""
    groups = problem.groups
    mean = sum(len(g) * _least_area(g) for g in groups) / problem.world_size
    sand: list[int] = []
    rocks = 0
    for g in sorted(range(len(groups)), key=lambda g: (-_least_area(groups[g]), g)):
        whole = groups[g].whole if len(groups[g].whole_by_rank()) == problem.world_size else None
        light = whole is not None and LIGHT * whole.work_us < mean and len(groups[g]) > 1
        if whole is not None and (light or sand or rocks + len(groups[g]) > max_rocks):
            sand.append(g)
        else:
            rocks += len(groups[g])
    return tuple(sand)
