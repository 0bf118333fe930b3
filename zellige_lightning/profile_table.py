"""From timed steps to a price table (paper, Sec. IV-B): marginal prices, what the budget did not reach, and
what noise has made absurd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from zellige_lightning.errors import ProfileError
from zellige_lightning.placement import Bucket, ParallelConfig
from zellige_lightning.placement.plan import WHOLE
from zellige_lightning.planner import ProfileTable
from zellige_lightning.planner.cost import PriceKey, StartKey
from zellige_lightning.planner.price_fit import FitKey, fit_all
from zellige_lightning.profile_rounds import Price, Probe, Rounds, base, price_of

_ABSURD = 0.5  # a price below that share of the least that its neighbours allow was spoilt by noise


def table_of(
    rounds: Rounds,
    probes: Sequence[Probe],
    buckets: tuple[Bucket, ...],
    all_reduce_us: float,
    fingerprint: Mapping[str, str | int | float],
    clock: str = "wall",
) -> ProfileTable:
    """The table of what was timed.

    Raises:
        ProfileError: no bucket fits whole.
    """
    fixed_us = fixed_cost_us(rounds, clock)
    measured = measured_prices(rounds, probes, fixed_us, clock)
    infeasible = {probe.key for probe in rounds.infeasible}
    skipped = {probe.key for probe in rounds.skipped} - set(measured) - infeasible
    starts = starts_us(rounds, fixed_us, clock)
    for key, price in measured.items():
        if key[1:] in starts and len(rounds.copies(key)) == 1:  # its start is part of what was timed
            measured[key] = price.without(starts[key[1:]])
    prices = {key: price.price_us for key, price in measured.items()}
    doubtful = doubtful_prices(buckets, prices)
    kept = {key: measured[key].at_least() for key in prices if key not in doubtful}
    filled = interpolated(buckets, kept, doubtful | skipped)
    every = {key: max(1, round(value)) for key, value in {**kept, **filled}.items()}
    spread = {key: round(measured[key].spread_us) for key in kept}
    rest = extrapolated(buckets, every)
    fixed = round(fixed_us + all_reduce_us)
    start = {key: round(us) for key, us in starts.items() if round(us)}
    return ProfileTable(buckets, every, rest, fixed, fingerprint, spread, frozenset(filled), start)


def fixed_cost_us(rounds: Rounds, clock: str) -> float:
    """What a step costs that carries next to nothing; no more than what steps with two numbers of whole
    sequences leave when their marginal costs are taken off, should that measurement have been spoilt."""
    rests = [rest for key, rest in rests_us(rounds, clock).items() if key[1].is_whole]
    known = median(rounds.times_us(base(), clock))
    return max(0.0, min(known, median(rests))) if rests else known


def starts_us(rounds: Rounds, fixed_us: float, clock: str) -> dict[StartKey, float]:
    """What starting a call that split sequences share takes: what their steps leave, beside a step's fixed
    cost. The number of tokens has no part in it, so that the buckets of a configuration vote."""
    rests: dict[StartKey, list[float]] = {}
    for key, rest in rests_us(rounds, clock).items():
        if not key[1].is_whole:
            rests.setdefault(key[1:], []).append(rest - fixed_us)
    return {key: max(0.0, median(found)) for key, found in rests.items()}


def rests_us(rounds: Rounds, clock: str) -> dict[PriceKey, float]:
    """Of every pair that was timed in two numbers of copies: a step less the marginal cost of its copies."""
    rests = {}
    for key in {probe.key for probe in rounds.samples}:
        times = {n: median(rounds.times_us(probe, clock)) for n, probe in rounds.copies(key).items()}
        if len(times) > 1:
            least, most = min(times), max(times)
            rests[key] = times[least] - least * (times[most] - times[least]) / (most - least)
    return rests


def measured_prices(
    rounds: Rounds, probes: Sequence[Probe], fixed_us: float, clock: str
) -> dict[PriceKey, Price]:
    """By pair, of the pairs all of whose probes were timed."""
    times: dict[PriceKey, dict[int, list[float]]] = {}
    missing = {p.key for p in probes if p not in rounds.samples}
    for probe in probes:
        if probe.key not in missing:
            times.setdefault(probe.key, {})[probe.copies] = rounds.times_us(probe, clock)
    return {key: price_of(found, fixed_us) for key, found in times.items()}


def doubtful_prices(buckets: Sequence[Bucket], prices: Mapping[PriceKey, float]) -> set[PriceKey]:
    """Prices that noise has made absurdly low, for what others of the same configuration cost."""
    tokens = {bucket.name: bucket.num_tokens for bucket in buckets}
    found = set()
    for key, price in prices.items():
        others = [(tokens[k[0]], p) for k, p in prices.items() if k != key and k[1:] == key[1:]]
        if others and price < max(1.0, _ABSURD * least_us(tokens[key[0]], others)):
            found.add(key)
    return found


def least_us(num_tokens: int, others: Sequence[tuple[int, float]]) -> float:
    """What a sequence costs at least, by what `others` (tokens, price) cost: no less than a shorter one, and
    no less than attention's part of a longer one, if all of that were attention. An extrapolated fit says
    nothing: it is off by more than that at the ends of a catalog."""
    return max(price * min(1.0, num_tokens / tokens) ** 2 for tokens, price in others)


def interpolated(
    buckets: Sequence[Bucket], prices: Mapping[PriceKey, float], wanted: set[PriceKey]
) -> dict[PriceKey, float]:
    """The wanted prices from the fits, where their configuration has one."""
    tokens = {bucket.name: bucket.num_tokens for bucket in buckets}
    points: dict[FitKey, list[tuple[int, int]]] = {}
    for key, price in prices.items():
        points.setdefault(key[1:], []).append((tokens[key[0]], max(1, round(price))))
    fits = fit_all(points)
    return {key: float(fits[key[1:]].price_us(tokens[key[0]])) for key in wanted if key[1:] in fits}


def extrapolated(buckets: tuple[Bucket, ...], prices: Mapping[PriceKey, int]) -> dict[str, int]:
    """Whole prices of the buckets that do not fit whole, from those that do. Used only by Eq. (4) and F.

    Raises:
        ProfileError: no bucket fits whole.
    """
    fitting = tuple(b for b in buckets if (b.name, WHOLE, "node") in prices)
    if not fitting:
        raise ProfileError(
            "no bucket of the catalog fits whole on one rank",
            fix="raise planner.memory_cap_gib, or add a smaller bucket to the catalog",
        )
    known = {key: price for key, price in prices.items() if key[1] == WHOLE}
    table = ProfileTable(fitting, known, {}, 0, {})
    return {bucket.name: table.whole_us(bucket) for bucket in buckets if bucket not in fitting}


def not_offered(
    table: ProfileTable, configs: Sequence[ParallelConfig], rounds: Rounds
) -> tuple[list[str], list[str]]:
    """Configurations without any price, and pairs that ran out of memory, as texts for the log."""
    priced = {key[1] for key in table.prices_us}
    missing = [str(config) for config in configs if config not in priced]
    spilled = sorted({f"{p.bucket.name} {p.config}" for p in rounds.infeasible})
    return missing, spilled
