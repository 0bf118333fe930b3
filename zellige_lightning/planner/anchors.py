"""Anchor Placement with CP-SAT-ECF: two certified rounds over bounded integer counts (paper, Eqs.
(5)-(7))."""

from __future__ import annotations

from dataclasses import dataclass

from ortools.sat.python import cp_model

from zellige_lightning.planner.problem import Cell, PlacementProblem


@dataclass(frozen=True)
class SolverLimits:
    """How CP-SAT runs. With a deterministic limit and one worker the same problem gives the same placement.

    Args:
        num_workers: search threads; one is deterministic and the fastest on few cores.
        deterministic_limit: bound on CP-SAT's deterministic time per round, about seconds of one core.
        seed: of the search.
    """

    num_workers: int = 1
    deterministic_limit: float = 60.0
    seed: int = 0


@dataclass(frozen=True)
class EcfResult:
    """Counts of both rounds.

    Args:
        cells: the placement of round 2 (of round 1 where round 2 found none); empty where there is none.
        best_us: T* of round 1, or the best makespan found where it is not certified.
        bound_us: proven lower bound of round 1.
        statuses: CP-SAT's status name of each round that ran.
    """

    cells: tuple[Cell, ...]
    best_us: int
    bound_us: int
    statuses: tuple[str, ...]

    @property
    def is_certified(self) -> bool:
        return self.statuses == ("OPTIMAL", "OPTIMAL")


class _EcfModel:
    """Variables u of Eq. (5), with the sums of Eq. (6). z is the sum of u over rank sets and needs no
    variable."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.model = cp_model.CpModel()
        self.counts: dict[tuple[int, int, tuple[int, ...]], cp_model.IntVar] = {}
        load: list[list[tuple[cp_model.IntVar, int]]] = [[] for _ in range(problem.world_size)]
        memory: list[list[tuple[cp_model.IntVar, int]]] = [[] for _ in range(problem.world_size)]
        splits = []
        for g, group in enumerate(problem.groups):
            row = []
            for j, choice in enumerate(group.choices):
                for ranks in choice.rank_sets:
                    count = self.model.new_int_var(0, len(group), f"u_{g}_{j}_{'_'.join(map(str, ranks))}")
                    self.counts[g, j, ranks] = count
                    row.append(count)
                    splits += [] if choice.config.is_whole else [count]
                    for rank in ranks:
                        load[rank].append((count, choice.price_us))
                        memory[rank].append((count, choice.memory_mib))
            self.model.add(sum(row) == len(group))  # Eq. (5)
        self.loads = [sum(count * price for count, price in terms) for terms in load]  # Eq. (6): L_r
        self.num_splits = sum(splits)  # Eq. (6): K
        for terms in memory:  # Eq. (6)-(7): H_r <= M_cap
            self.model.add(sum(count * mib for count, mib in terms) <= problem.cap_mib)

    def cells(self, solver: cp_model.CpSolver) -> tuple[Cell, ...]:
        values = ((key, solver.value(var)) for key, var in self.counts.items())
        return tuple(sorted(Cell(*key, count) for key, count in values if count))


def _solve(model: cp_model.CpModel, limits: SolverLimits) -> tuple[cp_model.CpSolver, str]:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = limits.num_workers
    solver.parameters.random_seed = limits.seed
    solver.parameters.max_deterministic_time = limits.deterministic_limit
    return solver, solver.status_name(solver.solve(model))


def place_anchors(problem: PlacementProblem, epsilon: float, limits: SolverLimits) -> EcfResult:
    """Eq. (7): the least largest load, then the fewest splits within (1 + epsilon) of it.

    An empty problem has the trivial optima T = K = 0. Infeasible or uncertified rounds show in `statuses`.
    """
    if not problem.groups:
        return EcfResult((), 0, 0, ("OPTIMAL", "OPTIMAL"))
    ecf = _EcfModel(problem)
    horizon = sum(len(g) * max(c.price_us for c in g.choices) for g in problem.groups)
    makespan = ecf.model.new_int_var(0, horizon, "T")
    for load in ecf.loads:
        ecf.model.add(load <= makespan)
    ecf.model.minimize(makespan)
    solver, status = _solve(ecf.model, limits)
    if status not in ("OPTIMAL", "FEASIBLE"):
        bound = 0 if status == "INFEASIBLE" else max(0, int(solver.best_objective_bound))
        return EcfResult((), 0, bound, (status,))
    first, best_us, bound_us = ecf.cells(solver), solver.value(makespan), int(solver.best_objective_bound)
    if status != "OPTIMAL":
        return EcfResult(first, best_us, bound_us, (status,))

    ecf.model.add(makespan <= slack_limit(best_us, epsilon))
    ecf.model.minimize(ecf.num_splits)
    hint = {(c.group, c.choice, c.ranks): c.count for c in first}
    for key, var in ecf.counts.items():
        ecf.model.add_hint(var, hint.get(key, 0))
    solver, second_status = _solve(ecf.model, limits)
    found = second_status in ("OPTIMAL", "FEASIBLE")
    return EcfResult(ecf.cells(solver) if found else first, best_us, bound_us, (status, second_status))


def slack_limit(best_us: int, epsilon: float) -> int:
    """Largest load that round 2 allows: floor((1 + epsilon) T*)."""
    return best_us + int(best_us * epsilon)
