"""From a global batch to the problem that a planner solves: legal, profiled choices that fit under the
cap."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from zellige_lightning.errors import PlanningError
from zellige_lightning.placement.plan import ParallelConfig
from zellige_lightning.placement.sequence import Bucket, GlobalBatch, Sequence
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.cost import MemoryModel, ProfileTable
from zellige_lightning.planner.options import legal_rank_sets
from zellige_lightning.planner.problem import (
    Choice,
    Group,
    PlacementProblem,
    RankSet,
    drop_dominated,
    slowed,
)
from zellige_lightning.planner.traffic import traffic


@dataclass
class OptionMenu:
    """C_s of every bucket: profiled configurations x legal rank sets, dominated ones dropped.

    Args:
        family: of the rank sets, see `legal_rank_sets`.
        max_degree: no configuration above it; None for no bound.
        slowness: of each rank, per mille of ordinary time; empty where all are alike.
    """

    table: ProfileTable
    memory: MemoryModel
    topology: Topology
    num_heads: int
    cap_mib: int
    family: str
    max_degree: int | None = None
    slowness: tuple[int, ...] = ()
    _menus: dict[Bucket, tuple[Choice, ...]] = field(default_factory=dict, repr=False)
    _sets: dict[int, dict[str, tuple[RankSet, ...]]] = field(default_factory=dict, repr=False)

    def problem(self, batch: GlobalBatch) -> PlacementProblem:
        """The groups of the batch, dearest first (ties by bucket name), so that the order of its sequences
        does not matter.

        Raises:
            PlanningError: a sequence fits no option; names it, its need per option and the cap.
        """
        members = _by_bucket(batch)
        for bucket, indices in members.items():
            if not self.choices(bucket):
                raise self.does_not_fit(batch.sequences[indices[0]], batch.step)
        order = sorted(members, key=lambda b: (-self.table.whole_us(b), b.name))
        groups = tuple(Group(b.name, tuple(members[b]), self.choices(b), b.num_tokens) for b in order)
        return PlacementProblem(self.topology.world_size, self.cap_mib, groups, self.slowness)

    def choices(self, bucket: Bucket) -> tuple[Choice, ...]:
        """Choices of a bucket that fit under the cap, made once per bucket."""
        if bucket not in self._menus:
            fitting = [c for c in self._all_choices(bucket) if c.memory_mib <= self.cap_mib]
            self._menus[bucket] = drop_dominated(fitting)
        return self._menus[bucket]

    def _all_choices(self, bucket: Bucket) -> list[Choice]:
        found = []
        for config, topology_class in self.table.classes:
            price = self.table.price_us(bucket, config, topology_class)
            if price is None or not self._is_legal(config):
                continue
            memory = self.memory.memory_mib(bucket.num_tokens, config)
            if rank_sets := self._rank_sets(config.degree).get(topology_class):
                sent = traffic(self.memory.geometry, bucket.num_tokens, config, topology_class)
                start = self.table.start_us.get((config, topology_class), 0)
                found += self._by_slowness(Choice(config, price, memory, rank_sets, sent, start_us=start))
        return found

    def _by_slowness(self, choice: Choice) -> list[Choice]:
        """The choice, apart for rank sets whose slowest rank differs, fastest first."""
        if not self.slowness:
            return [choice]
        sets: dict[int, list[RankSet]] = defaultdict(list)
        for ranks in choice.rank_sets:
            sets[max(self.slowness[r] for r in ranks)].append(ranks)
        return [
            replace(
                choice,
                price_us=slowed(choice.price_us, slowness),
                rank_sets=tuple(alike),
                nominal_us=choice.price_us,
                start_us=slowed(choice.start_us, slowness),
            )
            for slowness, alike in sorted(sets.items())
        ]

    def _is_legal(self, config: ParallelConfig) -> bool:
        limit = min(self.topology.world_size, self.max_degree or self.topology.world_size)
        return self.num_heads % config.h == 0 and config.degree <= limit

    def _rank_sets(self, degree: int) -> dict[str, tuple[RankSet, ...]]:
        if degree not in self._sets:
            by_class: dict[str, list[RankSet]] = {}
            for ranks in legal_rank_sets(self.topology, degree, self.family):
                by_class.setdefault(self.topology.class_of(ranks), []).append(ranks)
            self._sets[degree] = {name: tuple(sets) for name, sets in by_class.items()}
        return self._sets[degree]

    def does_not_fit(self, sequence: Sequence, step: int) -> PlanningError:
        """Names the sequence, its need per option and the cap."""
        needs = sorted({(c.config, c.memory_mib) for c in self._all_choices(sequence.bucket)})
        rows = ", ".join(f"{config}: {mib} MiB" for config, mib in needs) or "no profiled option"
        return PlanningError(
            f"sequence {sequence.index} ({sequence.key!r}, bucket {sequence.bucket.name!r}, "
            f"{sequence.num_tokens} tokens) fits no option under the cap of {self.cap_mib} MiB per rank "
            f"({rows})",
            fix="raise planner.memory_cap_gib, allow higher degrees (planner.max_degree, more ranks), or "
            "drop this shape from the catalog",
            step=step,
        )


def _by_bucket(batch: GlobalBatch) -> dict[Bucket, list[int]]:
    """Indices of each bucket, ascending. Sequences mostly share the bucket's object, whose identity is
    cheaper to hash than its shape (a batch may have 100,000 of them)."""
    objects: dict[int, list[int]] = defaultdict(list)
    for sequence in batch.sequences:
        objects[id(sequence.bucket)].append(sequence.index)
    members: dict[Bucket, list[int]] = {}
    for indices in objects.values():
        members.setdefault(batch.sequences[indices[0]].bucket, []).extend(indices)
    return {bucket: sorted(indices) for bucket, indices in members.items()}
