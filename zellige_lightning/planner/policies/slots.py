"""The best placement on disjoint rank groups as a CP-SAT model: which groups there are, and what each takes.

Interchangeable groups are counted, not named: a *slot* is the i-th group of one configuration on one node.
Groups lie inside a node, or cover whole nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ortools.sat.python import cp_model

from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.planner.policies.ledger import Ledger
from zellige_lightning.planner.policies.menu import PolicyProblem
from zellige_lightning.planner.problem import Choice, RankSet
from zellige_lightning.planner.solution import Brief

Row = tuple[Choice | None, ...]  # a group's option per group of the problem


@dataclass(frozen=True)
class Slot:
    """A possible rank group: `nodes` that it lies on (one), or covers (several)."""

    config: ParallelConfig
    nodes: tuple[int, ...]
    number: int


@dataclass(frozen=True)
class SlotSolution:
    """Placement and how far it is proven: `status` and `bound_us` are those of the restricted problem."""

    ledger: Ledger
    status: str
    bound_us: int


def nodes_of(problem: PolicyProblem) -> list[list[int]]:
    """Ranks of each node."""
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(problem.node_of):
        nodes.setdefault(node, []).append(rank)
    return list(nodes.values())


def make_slots(problem: PolicyProblem, configs: Iterable[ParallelConfig]) -> list[Slot]:
    nodes, slots = nodes_of(problem), list[Slot]()
    for config in configs:
        size = config.degree
        for n, ranks in enumerate(nodes):
            slots += [Slot(config, (n,), i) for i in range(len(ranks) // size)]
        slots += [Slot(config, cover, 0) for cover in _covers(nodes, size)]
    return slots


def _covers(nodes: list[list[int]], size: int) -> list[tuple[int, ...]]:
    """Runs of two and more neighbouring nodes with exactly `size` ranks."""
    return [
        tuple(range(a, b))
        for a in range(len(nodes))
        for b in range(a + 2, len(nodes) + 1)
        if sum(map(len, nodes[a:b])) == size
    ]


def first_ranks(problem: PolicyProblem, slot: Slot) -> RankSet:
    """Where a slot of that kind would lie if it were alone: the ranks that its price is read for."""
    nodes = nodes_of(problem)
    return tuple(r for n in slot.nodes for r in nodes[n])[: slot.config.degree]


def undominated(problem: PolicyProblem, configs: Iterable[ParallelConfig]) -> list[ParallelConfig]:
    """Configurations that no other one of their degree beats in price and memory for every bucket."""
    rows = {c: _row(problem, c, tuple(range(c.degree))) for c in configs}
    kept: list[ParallelConfig] = []
    for c, row in rows.items():
        if any(row) and not any(_beats(rows[k], row) for k in kept if k.degree == c.degree):
            kept = [k for k in kept if k.degree != c.degree or not _beats(row, rows[k])]
            kept.append(c)
    return kept


def _row(problem: PolicyProblem, config: ParallelConfig, ranks: RankSet) -> Row:
    return tuple(problem.choice(g, config, ranks) for g in range(len(problem.groups)))


def _beats(one: Row, other: Row) -> bool:
    return all(
        b is None or (a is not None and a.price_us <= b.price_us and a.memory_mib <= b.memory_mib)
        for a, b in zip(one, other, strict=True)
    )


class _SlotModel:
    """x[s]: slot s exists. A[s, g]: sequences of group g on slot s."""

    def __init__(self, problem: PolicyProblem, slots: list[Slot], every_slot_works: bool) -> None:
        self.model, self.problem = cp_model.CpModel(), problem
        self.slots = [s for s in slots if any(_row(problem, s.config, first_ranks(problem, s)))]
        self.counts: dict[tuple[int, int], cp_model.IntVar] = {}
        horizon = sum(len(g) * max(c.price_us for c in g.choices) for g in problem.groups)
        self.makespan = self.model.new_int_var(0, horizon, "T")
        self.exists = [self.model.new_bool_var(f"x_{s}") for s in range(len(self.slots))]
        self.loads = [self._slot(s, every_slot_works) for s in range(len(self.slots))]
        for g, group in enumerate(problem.groups):
            self.model.add(sum(v for (_, h), v in self.counts.items() if h == g) == len(group))
        self._cover(every_slot_works)
        self._order()
        self.model.minimize(self.makespan)

    def _slot(self, s: int, works: bool) -> cp_model.LinearExpr | int:
        slot, exists = self.slots[s], self.exists[s]
        row = _row(self.problem, slot.config, first_ranks(self.problem, slot))
        load: list[cp_model.LinearExpr] = []
        memory: list[cp_model.LinearExpr] = []
        for g, choice in enumerate(row):
            if choice is not None:
                size = len(self.problem.groups[g])
                count = self.counts[s, g] = self.model.new_int_var(0, size, f"A_{s}_{g}")
                self.model.add(count <= size * exists)
                load.append(count * choice.price_us)
                memory.append(count * choice.memory_mib)
        self.model.add(sum(load) <= self.makespan)
        self.model.add(sum(memory) <= self.problem.cap_mib)
        if works:
            self.model.add(sum(v for (t, _), v in self.counts.items() if t == s) >= exists)
        return sum(load)

    def _cover(self, exactly: bool) -> None:
        for n, ranks in enumerate(nodes_of(self.problem)):
            used = sum(
                (s.config.degree if len(s.nodes) == 1 else len(ranks)) * x
                for s, x in zip(self.slots, self.exists, strict=True)
                if n in s.nodes
            )
            self.model.add(used == len(ranks)) if exactly else self.model.add(used <= len(ranks))

    def _order(self) -> None:
        """Equal slots in order, fuller ones first: they are interchangeable."""
        for s in range(1, len(self.slots)):
            before, slot = self.slots[s - 1], self.slots[s]
            if slot.number and (before.config, before.nodes) == (slot.config, slot.nodes):
                self.model.add_implication(self.exists[s], self.exists[s - 1])
                self.model.add(self.loads[s] <= self.loads[s - 1])


def best_disjoint(
    problem: PolicyProblem, configs: Iterable[ParallelConfig], brief: Brief, every_slot_works: bool = False
) -> SlotSolution | None:
    """The least largest load over all layouts of groups with one of `configs` each.

    Args:
        every_slot_works: groups cover every rank, and each has a sequence (FlexSP); else ranks may idle.

    Returns:
        None where CP-SAT finds no placement within the deterministic limit.
    """
    built = _SlotModel(problem, make_slots(problem, configs), every_slot_works)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = brief.config.num_workers
    solver.parameters.random_seed = brief.config.seed
    solver.parameters.max_deterministic_time = brief.config.deterministic_limit
    status = solver.status_name(solver.solve(built.model))
    if status not in ("OPTIMAL", "FEASIBLE"):
        return None
    ledger = _decode(built, solver)
    return None if ledger is None else SlotSolution(ledger, status, int(solver.best_objective_bound))


def _decode(built: _SlotModel, solver: cp_model.CpSolver) -> Ledger | None:
    """Largest slots first from the start of their node; None where such ranks are no legal rank set."""
    problem, nodes = built.problem, nodes_of(built.problem)
    ledger, taken = Ledger(problem), [0] * len(nodes)
    chosen = [s for s in range(len(built.slots)) if solver.value(built.exists[s])]
    for s in sorted(chosen, key=lambda s: (-built.slots[s].config.degree, s)):
        slot = built.slots[s]
        ranks = first_ranks(problem, slot)
        if len(slot.nodes) == 1:
            (node,) = slot.nodes
            start, taken[node] = taken[node], taken[node] + slot.config.degree
            ranks = tuple(nodes[node][start : taken[node]])
        for g in range(len(problem.groups)):
            count = solver.value(built.counts[s, g]) if (s, g) in built.counts else 0
            if count and problem.find(g, slot.config, ranks) is None:
                return None
            if count:
                ledger.add(g, slot.config, ranks, count)
    return ledger
