"""Modeled clusters: conf/cluster/*.yaml, each constant with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement.topology import Topology
from zellige_lightning.simulator.constants import Transformer

GIB = 1 << 30


class PairedTopology(Topology):
    """Nodes in which ranks 2i and 2i + 1 share a fast bridge: such a pair is a class of its own."""

    def class_of(self, ranks: tuple[int, ...]) -> str:
        found = super().class_of(ranks)
        is_pair = found == "node" and len(ranks) == 2 and ranks[1] == ranks[0] + 1 and ranks[0] % 2 == 0
        return "pair" if is_pair else found


@dataclass(frozen=True)
class Cluster:
    """One rank's rates: operations and bytes per second (per direction), seconds, bytes. `sources` says
    where from.

    Raises:
        ConfigError: a constant that is missing, unknown, or not a positive number.
    """

    name: str
    ranks_per_node: int
    max_ranks: int
    peak_tflops: float
    pair_gb_per_s: float | None
    node_gb_per_s: float
    cross_gb_per_s: float
    memory_gib: float
    linear_efficiency: float
    attention_forward_efficiency: float
    attention_backward_efficiency: float
    half_efficiency_tokens: float
    collective_us: float
    hop_us: float
    split_launch_us: float
    usable_share: float
    state_bytes_per_parameter: float
    communicators_gib: float
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in CONSTANTS:
            value = getattr(self, name)
            least_zero = name in ("half_efficiency_tokens", "collective_us", "hop_us", "split_launch_us")
            good = isinstance(value, int | float) and not isinstance(value, bool) and value < float("inf")
            if value is None and name == "pair_gb_per_s":
                continue
            if not good or value < 0 or (value == 0 and not least_zero):
                raise ConfigError(f"cluster {self.name}: {name} = {value!r}", fix="a positive number")

    def topology(self, world_size: int) -> Topology:
        """Nodes of `ranks_per_node` ranks.

        Raises:
            ConfigError: a world that is not positive, or larger than the cluster.
        """
        if not 1 <= world_size <= self.max_ranks:
            raise ConfigError(
                f"{world_size} ranks on cluster {self.name}", fix=f"it simulates 1 to {self.max_ranks} ranks"
            )
        kind = Topology if self.pair_gb_per_s is None else PairedTopology
        return kind(tuple(rank // self.ranks_per_node for rank in range(world_size)))

    def bytes_per_s(self, link: str) -> float:
        """Of a link class: `pair`, `node`, or anything across nodes."""
        rates = {"pair": self.pair_gb_per_s or self.node_gb_per_s, "node": self.node_gb_per_s}
        return 1e9 * rates.get(link, self.cross_gb_per_s)

    def cap_mib(self, model: Transformer) -> int:
        """M_cap = M_usable - M_base (paper, Sec. IV-B).

        Raises:
            ConfigError: the model's states do not fit.
        """
        base = model.parameters * self.state_bytes_per_parameter / GIB + self.communicators_gib
        cap = int(1024 * (self.memory_gib * self.usable_share - base))
        if cap < 1:
            raise ConfigError(
                f"{model.name} with its states needs {base:.1f} GiB on each rank of {self.name}",
                fix="choose a smaller model or a cluster with more memory, or say what sharded states leave"
                " for sequences: --memory-cap-gib",
            )
        return cap

    def fixed_us(self, model: Transformer, world_size: int) -> int:
        """Placement-independent step cost: the all-reduce of all gradients over the slowest link."""
        if world_size == 1:
            return 0
        rate = self.bytes_per_s("node" if world_size <= self.ranks_per_node else "across")
        size = 2 * (world_size - 1) / world_size * model.parameters * model.element_bytes
        return round(1e6 * size / rate)


CONSTANTS = tuple(f.name for f in fields(Cluster) if f.name not in ("name", "sources"))


def cluster_names() -> list[str]:
    """Clusters that come with the package."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def load_cluster(name: str | Path) -> Cluster:
    """A cluster by its name in conf/cluster, or from a file of the same form.

    Raises:
        ConfigError: no such cluster, or a file that cannot be read; names what is wrong.
    """
    path = Path(name) if str(name).endswith((".yaml", ".yml")) else _folder() / f"{name}.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"there is no cluster {str(name)!r}",
            fix=f"known are {cluster_names()}, or give a .yaml file like theirs",
        ) from error
    return parse_cluster(path.stem, text)


def parse_cluster(name: str, text: str) -> Cluster:
    """Raises: ConfigError for anything but a mapping of all constants to [value, source]."""
    import yaml  # type: ignore[import-untyped]

    form = 'write `constant: [value, "source"]` lines'
    try:
        rows: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"cluster {name} is no YAML: {error}", fix=form) from error
    known = set(rows) if isinstance(rows, Mapping) else set()
    if known != set(CONSTANTS):
        wrong = sorted(map(str, known ^ set(CONSTANTS)))
        raise ConfigError(
            f"cluster {name}: missing or unknown constants {wrong}", fix=f"it needs {list(CONSTANTS)}"
        )
    for key, row in rows.items():
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[1], str):
            raise ConfigError(f"cluster {name}: {key} = {row!r}", fix=form)
    values = {key: row[0] for key, row in rows.items()}
    return Cluster(name=name, sources={key: row[1] for key, row in rows.items()}, **values)


def _folder() -> Path:
    return Path(str(import_module("zellige_lightning.conf").__file__)).parent / "cluster"
