"""What to do with a comparison: the best policy, KnapFormer's best layout, and whether memory or ranks
would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zellige_lightning.errors import ConfigError, PlanningError
from zellige_lightning.placement.plan import Plan
from zellige_lightning.placement.sequence import GlobalBatch
from zellige_lightning.planner.policies.adaptive_load import batch_sizes, fit_exponent
from zellige_lightning.planner.policies.knapformer import all_layouts, layout_name
from zellige_lightning.planner.policies.menu import policy_problem
from zellige_lightning.simulator.cluster import Cluster
from zellige_lightning.simulator.compare import OURS, PolicyRow, Stage
from zellige_lightning.simulator.constants import Transformer
from zellige_lightning.simulator.prices import modeled_table

MORE_MEMORY = 1.5
WORTH = 0.01  # a gain below one percent is called none


def best_policy(rows: Sequence[PolicyRow]) -> str:
    """One line: the fastest policy, and its distance to the others."""
    planned = [(row.plan.predicted_us, row.policy) for row in rows if row.plan is not None]
    if not planned:
        return "no policy fits this batch: lower the budget, or use more ranks"
    planned.sort()
    best_us, best = planned[0]
    others = [f"{us / best_us:.2f}x {name}" for us, name in planned[1:4]]
    return f"fastest: {best}, {best_us / 1e6:.2f} s" + (f" ({', '.join(others)})" if others else "")


def knapformer_layout(stage: Stage, batch: GlobalBatch) -> str:
    """One line for KnapFormer's users: the best layout under the cap, or what the best one would need."""
    problem = policy_problem(stage.planner(stage.config("knapformer")).menu.problem(batch))
    if found := all_layouts(problem):
        sizes, ledger = min(found, key=lambda row: row[1].makespan_us)
        return f"KnapFormer's best layout: {layout_name(sizes)}, {ledger.makespan_us / 1e6:.2f} s"
    free = all_layouts(replace(problem, cap_mib=1 << 40))
    if not free:
        return "KnapFormer has no priced layout here"
    sizes, ledger = min(free, key=lambda row: max(row[1].memory_mib))
    need = max(ledger.memory_mib) / 1024
    return (
        f"KnapFormer: every layout runs out of memory; the leanest, {layout_name(sizes)}, needs "
        f"{need:.1f} GiB of {problem.cap_mib / 1024:.1f}"
    )


def adaptive_load_sampler(stage: Stage) -> dict[str, Any]:
    """Exponent and batch size per bucket of AdaptiveLoad's sampler form; empty for a single length, which
    has no slope."""
    buckets = stage.table.buckets
    lengths = [bucket.num_tokens for bucket in buckets]
    if len(set(lengths)) < 2:
        return {}
    geometry = stage.model.geometry
    per_token = geometry.resident_bytes_per_token + geometry.transient_bytes_per_token
    memory_tokens = stage.cap_mib * (1 << 20) // (per_token + geometry.kv_bytes_per_token)
    exponent = fit_exponent(lengths, [stage.table.whole_us(bucket) for bucket in buckets])
    sizes = batch_sizes(lengths, exponent, memory_tokens)
    names = [bucket.name for bucket in buckets]
    return {"exponent": exponent, "batch_sizes": dict(zip(names, sizes, strict=True))}


def more_memory(stage: Stage, batch: GlobalBatch) -> str:
    """One line: the same batch under a cap half as large again."""
    have, more = _plan(stage, batch, 1.0), _plan(stage, batch, MORE_MEMORY)
    if more is None:
        return f"{MORE_MEMORY}x the memory would not make it fit"
    gib = stage.cap_mib * MORE_MEMORY / 1024
    if have is None:
        seconds = more.predicted_us / 1e6
        return f"more memory would help: with a cap of {gib:.1f} GiB {OURS} plans it in {seconds:.2f} s"
    gain = max(0.0, have.predicted_us / more.predicted_us - 1)
    limit = "" if gain > WORTH else ": memory is not the limit"
    return f"more memory ({gib:.1f} GiB) would gain {gain:.1%}{limit}"


def _plan(stage: Stage, batch: GlobalBatch, factor: float) -> Plan | None:
    try:
        return stage.planner(stage.config(OURS), int(stage.cap_mib * factor)).plan(batch)
    except PlanningError:
        return None


def more_ranks(stage: Stage, batch: GlobalBatch, cluster: Cluster, model: Transformer) -> str:
    """One line: the same batch on twice the ranks of a modeled cluster."""
    world = 2 * stage.topology.world_size
    try:
        topology = cluster.topology(world)
    except ConfigError:
        return f"{cluster.name} has no {world} ranks to compare with"
    table = modeled_table(cluster, model, topology, stage.table.buckets, family="aligned")
    wider = Stage(cluster, model, topology, table, stage.cap_mib)
    have, more = _plan(stage, batch, 1.0), _plan(wider, batch, 1.0)
    if more is None:
        return f"{world} ranks would not make it fit"
    if have is None:
        return f"more ranks would help: {world} of them take {more.predicted_us / 1e6:.2f} s"
    speedup = have.predicted_us / more.predicted_us
    return f"{world} ranks would be {speedup:.2f}x faster at the same batch ({speedup / 2:.0%} of ideal)"
