"""The paper's workload suites under all policies, and the ratios that sum them up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from zellige_lightning.placement.sequence import GlobalBatch
from zellige_lightning.planner.policies import knapformer
from zellige_lightning.planner.policies.knapformer import layout_name, partitions
from zellige_lightning.planner.policies.menu import policy_problem
from zellige_lightning.simulator.cluster import Cluster, load_cluster
from zellige_lightning.simulator.compare import OURS, PolicyRow, Stage, spread
from zellige_lightning.simulator.constants import SUITES, WAN_1_3B, Suite, Transformer
from zellige_lightning.simulator.prices import modeled_table
from zellige_lightning.simulator.traffic import closed_form_bytes
from zellige_lightning.simulator.workloads import suite_batch, suite_buckets

NEAR = 0.02  # KnapFormer layouts within 2 % of its lowest makespan count as its best


@dataclass(frozen=True)
class SuiteResult:
    """Rows of every policy for every video-token share of a suite."""

    suite: Suite
    cluster: Cluster
    rows: dict[int, dict[str, PolicyRow]]

    def ratios(self, rival: str, by_events: bool = True) -> list[float]:
        """Step of the rival over ours, per share; where the rival ran out of memory, without its cap."""
        found = []
        for rows in self.rows.values():
            theirs, ours = (step_s(rows[name], by_events) for name in (rival, OURS))
            if theirs is not None and ours is not None:
                found.append(theirs / ours)
        return found

    def out_of_memory(self, rival: str) -> int:
        """In how many shares it has no plan under the cap."""
        return sum(rows[rival].plan is None for rows in self.rows.values())

    def unproven(self, policy: str) -> int:
        """In how many shares CP-SAT stopped at its limit before it had proven the policy's placement."""
        plans = [rows[policy].any_plan for rows in self.rows.values()]
        return sum(
            plan is not None and any(status != "OPTIMAL" for status in plan.statuses) for plan in plans
        )

    @property
    def policies(self) -> list[str]:
        return list(next(iter(self.rows.values())))

    def additive_errors(self, policy: str) -> list[float]:
        return [error for rows in self.rows.values() if (error := rows[policy].additive_error) is not None]


def step_s(row: PolicyRow, by_events: bool = True) -> float | None:
    """Modeled step, the placement-independent cost included: simulated, or the largest sum of prices."""
    plan = row.any_plan
    if plan is None:
        return None
    if not by_events:
        return plan.predicted_us / 1e6
    return None if row.times is None else row.times.makespan + plan.fixed_us / 1e6


def make_stage(cluster: Cluster, ranks: int, seconds: int, model: Transformer = WAN_1_3B) -> Stage:
    """A world of a modeled cluster with the catalog of a suite."""
    topology = cluster.topology(ranks)
    table = modeled_table(cluster, model, topology, suite_buckets(seconds))
    return Stage(cluster, model, topology, table, cluster.cap_mib(model))


def run_suite(
    suite: Suite, shares: Sequence[int], policies: Iterable[str], cluster: Cluster | None = None
) -> SuiteResult:
    """All policies on the workloads of a suite, on its own cluster or on another one."""
    cluster = cluster or load_cluster(suite.cluster)
    stage, names = make_stage(cluster, suite.ranks, suite.seconds), tuple(policies)
    rows = {
        share: {row.policy: row for row in stage.rows(suite_batch(suite, share), names)} for share in shares
    }
    return SuiteResult(suite, cluster, rows)


def figures_of(result: SuiteResult) -> dict[str, float]:
    """Flat figures: `n8_high_knapformer_mean` by events, `..._prices_mean` by sums of prices, `..._oom`
    shares."""
    figures: dict[str, float] = {}
    for rival in result.policies:
        if rival == OURS:
            continue
        for label, by_events in (("", True), ("prices_", False)):
            if ratios := result.ratios(rival, by_events):
                for name, value in zip(("min", "mean", "max"), spread(ratios), strict=True):
                    figures[f"{result.suite.name}_{rival}_{label}{name}"] = round(value, 4)
        figures[f"{result.suite.name}_{rival}_oom"] = result.out_of_memory(rival)
    errors = [100 * abs(error) for error in result.additive_errors(OURS)]
    figures[f"{result.suite.name}_additive_error_pct_max"] = round(max(errors, default=0.0), 3)
    return figures


@dataclass(frozen=True)
class LayoutRow:
    """One KnapFormer layout on the high-load V50 workload, without the memory cap."""

    name: str
    makespan_s: float
    memory_mib: int
    sent: int


@dataclass(frozen=True)
class V50:
    """Attention bytes of the paper's high-load V50 workload on 8 ranks, one checkpointed step (paper, Fig.
    6a).

    Args:
        ours, paper: bytes of the exact and of the two-stage planner.
        usp: bytes of USP at its lowest modeled makespan, and the factorization.
        layouts: KnapFormer's within 2 % of its lowest modeled makespan, best first. They need no memory
        cap here: under
            it some have no plan at all.
        closed_ours, closed_usp: as the rivals' own implementations would count (`closed_form_bytes`).
    """

    ours: int
    paper: int
    usp: int
    usp_layout: str
    layouts: tuple[LayoutRow, ...]
    closed_ours: int
    closed_usp: int

    @property
    def vs_usp(self) -> float:
        return self.ours / self.usp

    @property
    def vs_knapformer(self) -> float:
        """Against the layout that moves most."""
        return self.ours / max(row.sent for row in self.layouts)


def v50_bytes(cluster: Cluster | None = None) -> V50:
    """Counted from plans alone, all on the same engine. Rivals' memory is not bounded, which favours them."""
    suite = SUITES["n8_high"]
    stage = make_stage(cluster or load_cluster(suite.cluster), suite.ranks, suite.seconds)
    batch, free = suite_batch(suite, 50), replace(stage, cap_mib=1 << 40)
    ours, paper = (stage.row(name, batch, simulate=False) for name in (OURS, "paper"))
    usp = min(
        ((name, free.row("usp", batch, layout=name, simulate=False)) for name in ("u1r8", "u2r4", "u4r2")),
        key=lambda pair: pair[1].any_plan.makespan_us if pair[1].any_plan else 1 << 60,
    )
    return V50(
        _sent(ours),
        _sent(paper),
        _sent(usp[1]),
        usp[0],
        tuple(_near_layouts(free, batch)),
        _closed(ours, batch, stage.model),
        _closed(usp[1], batch, stage.model),
    )


def _sent(row: PolicyRow) -> int:
    assert row.sent is not None, f"{row.policy} has no plan: {row.error}"
    return row.sent.total


def _closed(row: PolicyRow, batch: GlobalBatch, model: Transformer) -> int:
    """All-gathers are counted as rings: each rank receives every other shard once."""
    plan, total = row.any_plan, 0
    assert plan is not None
    for sequence, option in zip(batch.sequences, plan.options, strict=True):
        if not option.config.is_whole:
            config = replace(option.config, q=1, k=option.config.q * option.config.k)
            total += closed_form_bytes(config, sequence.num_tokens, model.attention)
    return total * model.layers


def _near_layouts(stage: Stage, batch: GlobalBatch) -> Iterable[LayoutRow]:
    problem = policy_problem(stage.planner(stage.config("knapformer")).menu.problem(batch))
    found = sorted(knapformer.all_layouts(problem), key=lambda row: row[1].makespan_us)
    limit = found[0][1].makespan_us * (1 + NEAR)
    for sizes, ledger in found:
        if ledger.makespan_us <= limit:
            row = stage.row("knapformer", batch, layout=layout_name(sizes), simulate=False)
            yield LayoutRow(layout_name(sizes), ledger.makespan_us / 1e6, max(ledger.memory_mib), _sent(row))


def uniform_layouts(world_size: int, num_heads: int) -> list[str]:
    """KnapFormer layouts with one bag size, for worlds whose layouts are too many to try."""
    sizes = [d for d in range(1, world_size + 1) if num_heads % d == 0 and world_size % d == 0]
    return [layout_name((d,) * (world_size // d)) for d in sizes]


def num_layouts(world_size: int, num_heads: int) -> int:
    """How many layouts a world has."""
    return sum(1 for _ in partitions(world_size, [d for d in range(1, world_size + 1) if num_heads % d == 0]))
