"""What `zellige-plan` reads: batches as histograms or manifests, and measured profiles that must fit the
world."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import import_module
from math import floor
from pathlib import Path
from typing import Any

from zellige_lightning.errors import ConfigError, DataError, ProfileError
from zellige_lightning.placement.sequence import Bucket, adhoc_name
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.cost import ProfileTable
from zellige_lightning.simulator.prices import topology_digest

MOST_SEQUENCES = 200_000
Counts = dict[Bucket, int]


def load_catalog(path: str | Path | None = None) -> dict[str, Bucket]:
    """Buckets by name, from a catalog file (default: the package's wan21 catalog).

    Raises:
        ConfigError: a file that is missing or has another form.
    """
    import yaml  # type: ignore[import-untyped]

    file = Path(path) if path else _conf() / "catalog" / "wan21.yaml"
    try:
        rows: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
        buckets = {str(name): Bucket(str(name), tuple(grid)) for name, grid in rows["buckets"].items()}
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the catalog {file.name} cannot be read: {type(error).__name__} {error}",
            fix="write `buckets:` and below it `name: [frames, rows, columns]`, as in conf/catalog",
        ) from error
    return buckets


def _conf() -> Path:
    return Path(str(import_module("zellige_lightning.conf").__file__)).parent


def find_bucket(name: str, catalog: Mapping[str, Bucket]) -> Bucket:
    """A bucket of the catalog, or the grid that is written as `41x45x80`.

    Raises:
        DataError: neither.
    """
    if name in catalog:
        return catalog[name]
    parts = name.split("x")
    if len(parts) == 3 and all(part.isdigit() and int(part) for part in parts):
        grid = int(parts[0]), int(parts[1]), int(parts[2])
        return next((b for b in catalog.values() if b.grid == grid), Bucket(adhoc_name(grid), grid))
    raise DataError(f"unknown bucket {name!r}", fix=f"a grid such as 41x45x80, or one of {sorted(catalog)}")


def parse_histogram(text: str, catalog: Mapping[str, Bucket]) -> Counts:
    """`video_720p_10s=3,image_720p=228`.

    Raises:
        DataError: an entry that is no `bucket=count`, an unknown bucket, or no sequence at all.
    """
    counts: Counter[Bucket] = Counter()
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = entry.rpartition("=")
        if not equals or not number.strip().isdigit():
            raise DataError(f"histogram entry {entry!r}", fix="write `bucket=count,bucket=count`")
        counts[find_bucket(name.strip(), catalog)] += int(number)
    return _checked(counts, "the histogram")


def read_manifest(path: str | Path, catalog: Mapping[str, Bucket]) -> Counts:
    """Samples of a JSON, JSON-lines or CSV file: each has `bucket`, or `grid` as `41x45x80` or [41, 45,
    80], and optionally `count`. A JSON object of bucket names and counts is a histogram. A Parquet file is
    the manifest of `zellige-encode`.

    Raises:
        DataError: a file that cannot be read, names the line.
    """
    file = Path(path)
    try:
        rows = _encoded(file) if file.suffix.lower() == ".parquet" else _rows(file)
    except (OSError, UnicodeDecodeError, csv.Error, ValueError, KeyError, ImportError) as error:
        raise DataError(
            f"the manifest {file.name} cannot be read: {error}",
            fix="give a .json, .jsonl or .csv file, or the manifest.parquet of zellige-encode (with pyarrow)",
        ) from error
    counts: Counter[Bucket] = Counter()
    for number, row in enumerate(rows, start=1):
        try:
            counts[_bucket_of(row, catalog)] += _count_of(row)
        except DataError as error:
            raise DataError(f"entry {number} of {file.name}: {error.message}", fix=error.fix) from error
    return _checked(counts, f"the manifest {file.name}")


def _encoded(file: Path) -> Iterable[Any]:
    """Grids and counts of the samples that `zellige-encode` wrote. Raises: ValueError, KeyError, OSError."""
    import pyarrow.parquet as pq

    columns = [pq.read_table(file).column(f"grid_{axis}").to_pylist() for axis in "tyx"]
    counted = Counter(zip(*columns, strict=True))
    return [{"grid": list(grid), "count": count} for grid, count in sorted(counted.items())]


def _rows(file: Path) -> Iterable[Any]:
    suffix, text = file.suffix.lower(), file.read_text(encoding="utf-8")
    if suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    if suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    data = json.loads(text)
    if isinstance(data, Mapping):
        return [{"bucket": name, "count": count} for name, count in data.items()]
    return data if isinstance(data, list) else [data]


def _bucket_of(row: Any, catalog: Mapping[str, Bucket]) -> Bucket:
    if isinstance(row, str):
        return find_bucket(row, catalog)
    named = (row.get("bucket") or row.get("grid")) if isinstance(row, Mapping) else None
    if isinstance(named, list | tuple):
        named = "x".join(map(str, named))
    if not isinstance(named, str):
        raise DataError(f"{row!r} has neither bucket nor grid", fix="give each sample `bucket` or `grid`")
    return find_bucket(named, catalog)


def _count_of(row: Any) -> int:
    count = (row.get("count") or 1) if isinstance(row, Mapping) else 1
    if isinstance(count, str) and count.strip().isdigit():
        count = int(count)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise DataError(f"count = {count!r}", fix="counts are integers >= 1")
    return count


def _checked(counts: Counter[Bucket], what: str) -> Counts:
    total = sum(counts.values())
    if not 1 <= total <= MOST_SEQUENCES:
        raise DataError(f"{what} has {total} sequences", fix=f"give 1 to {MOST_SEQUENCES} sequences")
    return {bucket: count for bucket, count in counts.items() if count}


def scaled(counts: Counts, tokens: int) -> Counts:
    """A batch of about that many tokens, never more, with the histogram's proportions.

    Raises:
        DataError: a budget below the smallest sequence.
    """
    have = sum(b.num_tokens * n for b, n in counts.items())
    wanted = {b: n * tokens / have for b, n in counts.items()}
    taken = {b: floor(w) for b, w in wanted.items()}
    left = tokens - sum(b.num_tokens * n for b, n in taken.items())
    while fitting := [b for b in wanted if b.num_tokens <= left]:
        # The bucket that lacks most of its tokens; images fill what no video fits into.
        bucket = max(fitting, key=lambda b: ((wanted[b] - taken[b]) * b.num_tokens, b.num_tokens))
        taken[bucket] += 1
        left -= bucket.num_tokens
    found = {bucket: count for bucket, count in taken.items() if count}
    if not found:
        raise DataError(
            f"a budget of {tokens} tokens holds no sequence of the histogram", fix="raise --tokens-per-gpu"
        )
    return found


def fitting_topology(table: ProfileTable, world_size: int | None, wanted: Topology | None) -> Topology:
    """The topology that a profile was measured on.

    Args:
        world_size: what the user asks for; None takes that of the profile.
        wanted: the topology of the cluster that the user named, if any.

    Raises:
        ProfileError: a profile of another world or other nodes.
    """
    measured = table.fingerprint.get("world_size")
    world = measured if isinstance(measured, int) else world_size
    if world is None or (world_size is not None and world != world_size):
        raise ProfileError(
            f"the profile was measured on {measured} ranks, not on {world_size}",
            fix="leave --ranks out, or profile with that many ranks",
        )
    digest = table.fingerprint.get("topology")
    choices = [wanted] if wanted else [Topology.uniform(world, n) for n in range(world, 0, -1)]
    found = next((t for t in choices if digest is None or topology_digest(t) == digest), None)
    if found is None:
        raise ProfileError(
            "the profile was measured on other nodes than the cluster has",
            fix="leave --cluster out, or profile there",
        )
    return found
