"""Steps of mixed plans, shards beside whole sequences, that the profiler times after the single prices: what
`planner/calibration.py` corrects those by."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from zellige_lightning.batch import RankBatch
from zellige_lightning.placement import Bucket, PlacementOption, Topology, whole
from zellige_lightning.planner import MemoryModel, ProfileTable
from zellige_lightning.planner.calibration import Observation
from zellige_lightning.planner.cost import PriceKey
from zellige_lightning.planner.options import legal_rank_sets
from zellige_lightning.profile_runs import Fill, Measurement

_LARGEST = 2.0  # a rank's load, in prices of the dearest option
_MOST_SEQUENCES = 64  # on a rank


@dataclass(frozen=True)
class Mix:
    """A plan without a batch of its own."""

    options: tuple[PlacementOption, ...]
    buckets: tuple[Bucket, ...]


class MixMaker:
    """Draws placements that fit under the cap; the same on all ranks.

    Args:
        table: whose options are drawn.
        family: of the rank sets.
        cap_mib: of each rank.
    """

    def __init__(
        self, table: ProfileTable, topology: Topology, family: str, memory: MemoryModel, cap_mib: int
    ) -> None:
        self._table, self._topology, self._family = table, topology, family
        self._memory, self._cap_mib = memory, cap_mib
        self._buckets = {bucket.name: bucket for bucket in table.buckets}
        self._wholes = sorted(key for key in table.prices_us if key[1].is_whole)
        self._splits = sorted(key for key in table.prices_us if not key[1].is_whole)
        self._aim_us = _LARGEST * max(table.prices_us.values())

    def mixes(self, count: int) -> list[Mix]:
        found = [self._mix(random.Random(number)) for number in range(count)]
        return [mix for mix in found if mix.options]

    def _mix(self, rng: random.Random) -> Mix:
        """Splits up to a share of the load, then whole sequences, each on the rank with the lowest load."""
        world = self._topology.world_size
        loads, room = [0.0] * world, [self._cap_mib] * world
        chosen: list[tuple[PlacementOption, Bucket]] = []
        share = rng.choice((0.0, 0.3, 0.6))
        tries = 4 * world
        while tries and self._splits and max(loads) < share * self._aim_us:
            tries -= not self._place(rng.choice(self._splits), loads, room, chosen, rng)
        tries = 4 * world
        while tries and min(loads) < self._aim_us and len(chosen) < _MOST_SEQUENCES * world:
            tries -= not self._place(rng.choice(self._wholes), loads, room, chosen, rng)
        return Mix(tuple(option for option, _ in chosen), tuple(bucket for _, bucket in chosen))

    def _place(
        self,
        key: PriceKey,
        loads: list[float],
        room: list[int],
        chosen: list[tuple[PlacementOption, Bucket]],
        rng: random.Random,
    ) -> bool:
        name, config, where = key
        bucket, price = self._buckets[name], self._table.prices_us[key]
        if config.is_whole:
            option = whole(loads.index(min(loads)))
        else:
            sets = legal_rank_sets(self._topology, config.degree, self._family)
            option = PlacementOption(
                config, rng.choice([ranks for ranks in sets if self._topology.class_of(ranks) == where])
            )
        need = self._memory.memory_mib(bucket.num_tokens, config)
        if any(room[rank] < need for rank in option.ranks):
            return False
        for rank in option.ranks:
            loads[rank] += price
            room[rank] -= need
        chosen.append((option, bucket))
        return True


def observed(
    measurement: Measurement, mixes: Sequence[Mix], repeats: int, budget_s: float, clock: str, fill: Fill
) -> list[Observation]:
    """Makespans of the mixes that fit in memory and in the budget; repeats are interleaved. A collective.

    Args:
        fill: their pauses are filled as in training.
    """
    times: dict[int, list[float]] = {}
    batches: dict[int, RankBatch] = {}
    seconds = 0.0
    for number, mix in enumerate(mixes):
        if measurement.elapsed_s + 2 * seconds > budget_s:
            break
        batch = measurement.plan(list(mix.options), list(mix.buckets), fill)
        began = measurement.elapsed_s
        if measurement.fits(batch):
            batches[number] = batch
            times[number] = [max(measurement.step(batch).by(clock))]
        seconds = max(seconds, (measurement.elapsed_s - began) / 2)
    for _ in range(repeats - 1):
        for number, batch in batches.items():
            if measurement.elapsed_s + seconds <= budget_s:
                times[number].append(max(measurement.step(batch).by(clock)))
    return [
        Observation(mixes[number].options, mixes[number].buckets, median(found), number)
        for number, found in times.items()
    ]
