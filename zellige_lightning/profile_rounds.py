"""Which steps the profiler times, in which order, and how often: within a time budget, interleaved, so that
what else the machine does meets all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from zellige_lightning.batch import RankBatch
from zellige_lightning.placement import Bucket, ParallelConfig, PlacementOption, Topology
from zellige_lightning.placement.plan import WHOLE
from zellige_lightning.planner.cost import PriceKey
from zellige_lightning.planner.options import legal_rank_sets
from zellige_lightning.profile_runs import Measurement, Timing, everywhere

PACK_TOKENS = 2048  # short sequences are timed several at a time, as they will run
MOST_COPIES = 16
NOISY = 0.02  # of a price: a standard error above which its steps are timed again
_EXTRA = 3  # at most that many times the usual repeats
TINY = Bucket("tiny", (1, 1, 1))
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Probe:
    """A step to be timed: `copies` sequences of one shape under one configuration, on every rank where whole,
    else on one rank set of the class."""

    bucket: Bucket
    config: ParallelConfig
    topology_class: str
    ranks: tuple[int, ...]
    copies: int = 1

    @property
    def key(self) -> PriceKey:
        """Of the price that it is timed for."""
        return self.bucket.name, self.config, self.topology_class

    @property
    def tokens(self) -> int:
        """Of all copies."""
        return self.copies * self.bucket.num_tokens

    def placed(self, world_size: int) -> tuple[list[PlacementOption], list[Bucket]]:
        if self.config.is_whole:
            options = everywhere(world_size, self.copies)
        else:
            options = [PlacementOption(self.config, self.ranks)] * self.copies
        return options, [self.bucket] * len(options)

    def time_us(self, timing: Timing, clock: str) -> float:
        """Whole sequences wait for nobody: their ranks are as many measurements. Ranks that share one wait
        for the slowest."""
        times = timing.by(clock)
        return median(times) if self.config.is_whole else max(times[rank] for rank in self.ranks)


def base() -> Probe:
    """The step that carries next to nothing: what every step costs, whatever its placement."""
    return Probe(TINY, WHOLE, "node", (0,))


def probes_of(
    buckets: Sequence[Bucket],
    configs: Sequence[ParallelConfig],
    topology: Topology,
    family: str,
    fits: Callable[[Bucket, ParallelConfig], bool],
) -> list[Probe]:
    """Every pair that the legal family can place and that fits under the cap.

    A sequence that shares its call with others (whole, or split over heads only) is timed in two numbers of
    copies: their difference is the marginal cost of one more.
    """
    found = []
    for config in configs:
        for where, ranks in one_set_per_class(topology, config.degree, family).items():
            for bucket in buckets:
                if bucket.num_tokens >= config.degree and fits(bucket, config):
                    found += [Probe(bucket, config, where, ranks, n) for n in copies_of(bucket, config)]
    return found


def copies_of(bucket: Bucket, config: ParallelConfig) -> tuple[int, ...]:
    """Numbers of copies to time: one for what runs by itself, a few and twice as many for whole sequences.
    Of what shares a call one and many, since its start is what one takes beyond the price of one more."""
    most = min(MOST_COPIES, PACK_TOKENS * config.degree // bucket.num_tokens)
    if not config.is_packed or most < 2:
        return (1,)
    return (most // 2, most // 2 * 2) if config.is_whole else (1, most)


def one_set_per_class(topology: Topology, degree: int, family: str) -> dict[str, tuple[int, ...]]:
    """A legal rank set of each topology class."""
    if family == "all":  # their classes are those of consecutive ranks, and listing them may take for ever
        family = "contiguous"
    found: dict[str, tuple[int, ...]] = {}
    for ranks in legal_rank_sets(topology, degree, family):
        found.setdefault(topology.class_of(ranks), ranks)
    return found


def informative_first(probes: Sequence[Probe]) -> list[Probe]:
    """Whole sequences from short to long, so that each tells how long the next will take; then of each other
    configuration the shortest and the longest, then those between, so that a fit is possible early."""
    lengths = sorted({probe.bucket.num_tokens for probe in probes if not probe.config.is_whole})
    order = {length: place for place, length in enumerate(_ends_first(lengths))}

    def place(probe: Probe) -> tuple[bool, int, ParallelConfig, str, int]:
        tokens = probe.bucket.num_tokens
        first = tokens if probe.config.is_whole else order[tokens]
        return not probe.config.is_whole, first, probe.config, probe.topology_class, probe.tokens

    return sorted(probes, key=place)


def _ends_first(values: Sequence[int]) -> list[int]:
    """First, last, then the middle of each gap."""
    if len(values) <= 2:
        return list(values)
    order, gaps = [values[0], values[-1]], [(0, len(values) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(values[middle])
            gaps += [(low, middle), (middle, high)]
    return order


@dataclass
class Rounds:
    """Times probes round by round. All decisions follow from what all ranks know, so that they take the same.

    Args:
        budget_s: no further step starts that would probably end after it; the shortest whole sequence is
            always timed.
        repeats: of each probe; fewer of one whose repeats would take more than its share of the budget, more
            of one whose repeats differ.
        clock: `wall` or `cpu`.
        progress: called with the number of steps done and of those planned.

    Attributes:
        samples: of each probe, every timing.
        infeasible: probes for which some rank ran out of memory.
        skipped: probes that the budget did not reach.
    """

    measurement: Measurement
    budget_s: float
    repeats: int
    clock: str = "wall"
    progress: Progress = lambda done, planned: None
    samples: dict[Probe, list[Timing]] = field(default_factory=dict)
    infeasible: set[Probe] = field(default_factory=set)
    skipped: set[Probe] = field(default_factory=set)
    _prepared: dict[Probe, RankBatch] = field(default_factory=dict)

    def run(self, probes: Sequence[Probe]) -> None:
        planned = len(probes) * self.repeats
        shortest = next((p.bucket for p in probes if p.bucket != TINY and p.config.is_whole), TINY)
        for probe in probes:
            self._first(probe, probe.config.is_whole and probe.bucket in (TINY, shortest))
            self.progress(self._done, planned)
        for number in range(1, _EXTRA * self.repeats):
            wanted = [p for p in self._prepared if self._wants(p, number, len(probes))]
            if not wanted:
                break
            for probe in wanted:
                if self._affords(probe, 1.0):
                    self.samples[probe].append(self.measurement.step(self._prepared[probe]))
                    self.progress(self._done, planned)

    @property
    def _done(self) -> int:
        return sum(map(len, self.samples.values()))

    def _first(self, probe: Probe, always: bool) -> None:
        if not always and not self._affords(probe, 2.0):
            self.skipped.add(probe)
            return
        batch = self.measurement.plan(*probe.placed(self.measurement.world_size))
        if not self.measurement.fits(batch):
            self.infeasible.add(probe)
            return
        self._prepared[probe] = batch
        self.samples[probe] = [self.measurement.step(batch)]

    def _wants(self, probe: Probe, number: int, num_probes: int) -> bool:
        """One more sample in round `number`."""
        if number < self.repeats:
            share_s = self.budget_s / max(1, num_probes)
            return number < max(2, share_s / max(1e-6, self._seconds(probe)))
        return self._is_uncertain(probe)

    def _is_uncertain(self, probe: Probe) -> bool:
        """Noise of the steps leaves doubt about the price, which is a small difference of large times where
        sequences are packed."""
        times = {copies: self.times_us(p) for copies, p in self.copies(probe.key).items()}
        error = math.hypot(*(standard_error(found) for found in times.values()))
        most, least = max(times), min(times)
        fixed = [] if probe.bucket == TINY else self.times_us(base())
        rest = times[least] if most > least else fixed
        return error > NOISY * (median(times[most]) - (median(rest) if rest else 0.0))

    def _affords(self, probe: Probe, steps: float) -> bool:
        return self.measurement.elapsed_s + steps * self._seconds(probe) <= self.budget_s

    def _seconds(self, probe: Probe) -> float:
        """Of a step on the wall clock: the last one, or scaled from the nearest that was timed, as if all
        were attention."""
        if probe in self.samples:
            return max(self.samples[probe][-1].wall_us) / 1e6
        alike = [p for p in self.samples if p.config in (probe.config, WHOLE) and p.bucket != TINY]
        if not alike:
            return 0.0
        nearest = min(alike, key=lambda p: (abs(math.log(p.tokens / probe.tokens)), p.config != probe.config))
        work = probe.copies * probe.bucket.num_tokens**2 / (nearest.copies * nearest.bucket.num_tokens**2)
        share = nearest.config.degree / probe.config.degree
        return max(self.samples[nearest][-1].wall_us) / 1e6 * max(1.0, work * share)

    def copies(self, key: PriceKey) -> dict[int, Probe]:
        """What was timed for a price, by number of copies."""
        return {probe.copies: probe for probe in self.samples if probe.key == key}

    def times_us(self, probe: Probe, clock: str | None = None) -> list[float]:
        return [probe.time_us(timing, clock or self.clock) for timing in self.samples[probe]]


def standard_error(times: Sequence[float]) -> float:
    """Of the median, from the median deviation."""
    return 1.253 * 1.4826 * deviation(times) / len(times) ** 0.5


def deviation(times: Sequence[float]) -> float:
    """Median distance from the median."""
    center = median(times)
    return median(abs(x - center) for x in times)


@dataclass(frozen=True)
class Price:
    """What one more sequence costs a participating rank, how far a single measurement is from it, and what a
    step with as many as were timed takes per sequence, with its fixed cost."""

    price_us: float
    spread_us: float
    share_us: float

    def without(self, start_us: float) -> Price:
        """Less the start of its call; half of it where the start is known no better than that."""
        return replace(self, price_us=max(self.price_us - start_us, self.price_us / 2))

    def at_least(self) -> float:
        """The price; half of a step's share where noise leaves nothing of it and no neighbour can tell."""
        return self.price_us if self.price_us >= 1.0 else self.share_us / 2


def price_of(times: Mapping[int, Sequence[float]], fixed_us: float) -> Price:
    """The price from step times by number of copies.

    With two numbers of copies the step's fixed cost cancels; with one it is subtracted.
    """
    counts = sorted(times)
    most, least = counts[-1], counts[0]
    if most > least:
        price = (median(times[most]) - median(times[least])) / (most - least)
        spread = (deviation(times[most]) + deviation(times[least])) / (most - least)
    else:
        price, spread = (median(times[most]) - fixed_us) / most, deviation(times[most]) / most
    return Price(price, spread, median(times[most]) / most)
