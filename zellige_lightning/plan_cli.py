"""`zellige-plan`: what every policy would do with a batch on a cluster, without torch, lightning or a GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zellige_lightning.errors import ConfigError, ZelligeError

EXAMPLES = ("fig2", "reviewer")
_PROFILE_LABEL = "predicted from the measured profile"
_MODEL_LABEL = "modeled"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 2 on a typed error, which it prints."""
    options = _parser().parse_args(arguments)
    try:
        report = plan_report(options)
    except ZelligeError as error:
        print(f"zellige-plan: {error}", file=sys.stderr)
        return 2
    if options.json:
        Path(options.json).write_text(json.dumps(report["data"], indent=1), encoding="utf-8")
    print(report["text"])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="zellige-plan", description=__doc__)
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--example", choices=EXAMPLES, help="a built-in batch (default: the paper's Fig. 2)")
    batch.add_argument("--histogram", metavar="BUCKET=N,...", help="counts by bucket name or grid TxHxW")
    batch.add_argument(
        "--manifest", metavar="FILE", help="samples as .json, .jsonl or .csv with bucket or grid"
    )
    parser.add_argument(
        "--tokens-per-gpu", type=int, metavar="N", help="scale the batch to this budget per rank"
    )
    parser.add_argument("--catalog", metavar="FILE", help="bucket names and grids (default: Wan2.1's)")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="modeled cluster (default: a800)")
    parser.add_argument("--profile", metavar="FILE", help="measured prices, instead of modeled ones")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of ranks")
    parser.add_argument("--model", default="wan21_1_3b", help="model whose geometry is used")
    parser.add_argument(
        "--memory-cap-gib", type=float, metavar="GIB", help="what sequences may take per rank"
    )
    parser.add_argument("--policies", metavar="A,B,...", help="only these (default: all)")
    parser.add_argument("--layout", metavar="L", help="KnapFormer's bags or USP's factorization")
    parser.add_argument("--picture", metavar="POLICY=FILE", action="append", default=[], help="draw a plan")
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    return parser


def plan_report(options: argparse.Namespace) -> dict[str, Any]:
    """Text and data of one comparison.

    Raises:
        ZelligeError: unreadable or contradictory input.
    """
    from zellige_lightning.simulator import advice
    from zellige_lightning.simulator.workloads import batch_of

    setup = _Setup(options)
    batch = batch_of(setup.counts)
    rows = [setup.row(policy, batch) for policy in setup.policies]
    lines = [advice.best_policy(rows)]
    if len(batch.sequences):
        lines += [advice.knapformer_layout(setup.stage, batch), advice.more_memory(setup.stage, batch)]
    if not setup.measured:
        lines.append(advice.more_ranks(setup.stage, batch, setup.cluster, setup.model))
    _draw(options.picture, rows, batch, setup)
    data = {
        "source": _PROFILE_LABEL if setup.measured else _MODEL_LABEL,
        "cluster": setup.cluster.name,
        "ranks": setup.stage.topology.world_size,
        "model": setup.model.name,
        "cap_mib": setup.stage.cap_mib,
        "batch": {bucket.name: count for bucket, count in setup.counts.items()},
        "tokens": batch.num_tokens,
        "policies": [_record(row, setup) for row in rows],
        "advice": lines,
        "adaptive_load_sampler": advice.adaptive_load_sampler(setup.stage),
        "constants": {
            name: [getattr(setup.cluster, name), why] for name, why in setup.cluster.sources.items()
        },
    }
    return {"data": data, "text": _text(data)}


class _Setup:
    """The inputs of a comparison, checked."""

    def __init__(self, options: argparse.Namespace) -> None:
        from zellige_lightning.planner.cost import ProfileTable
        from zellige_lightning.simulator import inputs
        from zellige_lightning.simulator.cluster import load_cluster
        from zellige_lightning.simulator.compare import Stage
        from zellige_lightning.simulator.prices import modeled_table

        self.model, self.cluster = _model(options.model), load_cluster(options.cluster or "a800")
        self.measured, self.layout = options.profile is not None, options.layout or "auto"
        self.policies = _policies(options.policies)
        counts, ranks = _batch(options, inputs.load_catalog(options.catalog))
        if self.measured:
            table = ProfileTable.load(options.profile)
            asked = options.ranks if options.ranks is not None else _world(table)
            named = self.cluster.topology(asked) if options.cluster else None
            topology = inputs.fitting_topology(table, options.ranks, named)
        else:
            topology = self.cluster.topology(options.ranks if options.ranks is not None else ranks)
        self.counts = _within_budget(counts, options.tokens_per_gpu, topology.world_size)
        if not self.measured:
            table = modeled_table(self.cluster, self.model, topology, list(self.counts))
        cap = _cap_mib(options.memory_cap_gib) or self.cluster.cap_mib(self.model)
        self.stage = Stage(self.cluster, self.model, topology, table, cap)

    def row(self, policy: str, batch: Any) -> Any:
        layout = self.layout if policy in ("knapformer", "usp") else "auto"
        return self.stage.row(policy, batch, layout=layout, simulate=not self.measured)


def _model(name: str) -> Any:
    from zellige_lightning.simulator.constants import MODELS

    if name not in MODELS:
        raise ConfigError(f"unknown model {name!r}", fix=f"known are {sorted(MODELS)}")
    return MODELS[name]


def _policies(text: str | None) -> tuple[str, ...]:
    from zellige_lightning.simulator.compare import ALL_POLICIES

    chosen = tuple(name.strip() for name in text.split(",")) if text else ALL_POLICIES
    if unknown := [name for name in chosen if name not in ALL_POLICIES]:
        raise ConfigError(f"unknown policies {unknown}", fix=f"known are {list(ALL_POLICIES)}")
    return chosen


def _world(table: Any) -> int:
    world = table.fingerprint.get("world_size")
    return world if isinstance(world, int) else 1


def _batch(options: argparse.Namespace, catalog: Any) -> tuple[dict[Any, int], int]:
    """Counts by bucket, and the ranks that the batch is meant for."""
    from zellige_lightning.simulator import inputs, workloads

    if options.manifest:
        return inputs.read_manifest(options.manifest, catalog), 8
    if options.histogram:
        return inputs.parse_histogram(options.histogram, catalog), 8
    if options.example == "reviewer":
        return workloads.reviewer_counts(), 16
    return workloads.fig2_counts(), 4


def _within_budget(counts: dict[Any, int], tokens_per_gpu: int | None, ranks: int) -> dict[Any, int]:
    from zellige_lightning.simulator.inputs import scaled

    if tokens_per_gpu is None:
        return counts
    if tokens_per_gpu < 1:
        raise ConfigError(f"--tokens-per-gpu {tokens_per_gpu}", fix="a budget of at least one token")
    return scaled(counts, tokens_per_gpu * ranks)


def _cap_mib(gib: float | None) -> int | None:
    if gib is not None and not 0 < gib < 1 << 20:
        raise ConfigError(f"--memory-cap-gib {gib}", fix="GiB above 0")
    return None if gib is None else max(1, int(gib * 1024))


def _record(row: Any, setup: _Setup) -> dict[str, Any]:
    plan = row.any_plan
    record: dict[str, Any] = {"policy": row.policy, "out_of_memory": row.out_of_memory, "error": row.error}
    if plan is None:
        return record
    record |= {
        "predicted_s": plan.predicted_us / 1e6,
        "imbalance": plan.imbalance,
        "splits": plan.num_splits,
        "bytes_by_link": dict(row.sent.by_link),
        "bytes_by_kind": dict(row.sent.by_kind),
        "peak_memory_gib": max(plan.memory_mib) / 1024,
        "gap": plan.gap,
        "planning_ms": plan.solve_ms,
    }
    if row.times is not None:
        record["simulated_s"] = row.times.makespan + plan.fixed_us / 1e6
        record["exposed_s"], record["waiting_s"] = max(row.times.exposed), max(row.times.waiting)
    return record


def _text(data: dict[str, Any]) -> str:
    batch = ", ".join(f"{count} x {name}" for name, count in data["batch"].items())
    head = [
        f"{batch} ({data['tokens']:,} tokens) on {data['ranks']} ranks of {data['cluster']}, "
        f"{data['model']}, cap {data['cap_mib'] / 1024:.1f} GiB; all times {data['source']}",
        "",
        f"{'policy':14}{'step s':>9}{'events s':>10}{'max/mean':>9}{'splits':>8}{'GB node':>9}"
        f"{'GB across':>10}{'peak GiB':>9}{'gap':>8}{'plan ms':>9}",
    ]
    return "\n".join([*head, *map(_line, data["policies"]), "", *data["advice"]])


def _line(record: dict[str, Any]) -> str:
    if "predicted_s" not in record:
        return f"{record['policy']:14}  {record['error'][:100]}"
    links = record["bytes_by_link"]
    near = sum(size for link, size in links.items() if link in ("node", "pair")) / 1e9
    far = sum(size for link, size in links.items() if link not in ("node", "pair")) / 1e9
    events = f"{record['simulated_s']:10.2f}" if "simulated_s" in record else f"{'-':>10}"
    note = "  OUT OF MEMORY (times without a cap)" if record["out_of_memory"] else ""
    return (
        f"{record['policy']:14}{record['predicted_s']:9.2f}{events}{record['imbalance']:9.3f}"
        f"{record['splits']:8d}{near:9.1f}{far:10.1f}{record['peak_memory_gib']:9.1f}{record['gap']:8.2%}"
        f"{record['planning_ms']:9.1f}{note}"
    )


def _draw(wanted: Sequence[str], rows: Sequence[Any], batch: Any, setup: _Setup) -> None:
    """Raises: ConfigError for a policy that was not compared or has no plan."""
    for entry in wanted:
        name, equals, path = entry.partition("=")
        plan = next((row.any_plan for row in rows if row.policy == name), None)
        if not equals or plan is None:
            raise ConfigError(f"--picture {entry}", fix="write POLICY=FILE.png with a policy that has a plan")
        from zellige_lightning.report.pictures import plan_picture, prices_of

        plan_picture(plan, batch, path, prices_of(plan, batch, setup.stage.table, setup.stage.topology))


if __name__ == "__main__":
    sys.exit(main())
