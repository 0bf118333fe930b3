"""From what steps took to the next version of the prices: coarse, with as few changes as explain it, and none
that does not lower the error by more than noise would."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from zellige_lightning.planner.correction import LEVEL, MOST_LEVELS, PriceCorrection, factor_of, levels
from zellige_lightning.planner.residuals import LEAST_STEPS, Causes, Design, Observation, explain

STEP = math.log(LEVEL)
HYSTERESIS = 0.75  # levels that an estimate must be away from the present one
WORTH, WORTH_SHARE = 0.005, 0.15  # mean error by which a new version is better at least: absolute, relative
NEEDED = 0.002  # a single factor by that much
CHANCE = 2.0  # times what it would gain if it only followed noise: the best of many factors gains that
NOISE_STEP, MOST_NOISE = 10, 50  # per mille
ALARMING = 9  # levels (1.55 times) beyond which the profile itself should be measured again
NOTABLE = 2  # levels (1.10 times) of a rank that is called a straggler

Levels = dict[Hashable, int]


def reprice(observations: Sequence[Observation], current: PriceCorrection) -> PriceCorrection:
    """The next correction; the present one, but for `noise`, where no other is clearly better.

    Args:
        observations: of steps planned by any correction; the last is the newest.
    """
    design = Design(observations)
    causes = explain(design)
    old = _levels_of(current, design.world)
    new = old | {name: _level(value, old.get(name, 0)) for name, value in _estimates(design, causes)}
    new = _fewest_changes(design, old, new)
    before, after = design.error(_causes(old, design.world)), design.error(_causes(new, design.world))
    if before - after <= WORTH + WORTH_SHARE * after:
        new = old
    noise = current.noise
    wanted = min(MOST_NOISE, NOISE_STEP * max(1, round(1000 * causes.noise / NOISE_STEP)))
    if abs(wanted - noise) > NOISE_STEP or not noise:
        noise = wanted
    return _correction(new, design.world, noise)


def _level(value: float, present: int) -> int:
    exact = max(-MOST_LEVELS, min(MOST_LEVELS, value / STEP))
    return present if abs(exact - present) <= HYSTERESIS else round(exact)


def _estimates(design: Design, causes: Causes) -> Iterator[tuple[Hashable, float]]:
    yield "overall", causes.overall
    for bucket, value in causes.buckets.items():
        if design.bucket_steps[bucket] >= LEAST_STEPS:
            yield ("bucket", bucket), value
    for key, value in causes.keys.items():
        if design.key_steps[key] >= LEAST_STEPS:
            yield ("key", key), value
    for rank, value in enumerate(causes.ranks):
        yield ("rank", rank), value


def _fewest_changes(design: Design, old: Levels, new: Levels) -> Levels:
    """`new` without the changes that explain next to nothing, or no more than noise lets them, the smallest
    first."""
    changed = [name for name, level in new.items() if level != old.get(name, 0)]
    error = design.error(_causes(new, design.world))
    needed = max(NEEDED, CHANCE * error / design.num_effective)
    for name in sorted(changed, key=lambda n: (abs(new[n] - old.get(n, 0)), str(n))):
        without = new | {name: old.get(name, 0)}
        if (left := design.error(_causes(without, design.world))) <= error + needed:
            new, error = without, min(error, left)
    return new


def _levels_of(correction: PriceCorrection, world: int) -> Levels:
    ranks = correction.ranks or (0,) * world
    return {
        "overall": correction.overall,
        **{("bucket", name): level for name, level in correction.buckets},
        **{("key", key): level for key, level in correction.keys},
        **{("rank", rank): level for rank, level in enumerate(ranks)},
    }


def _of(kind: str, found: Mapping[Hashable, int]) -> list[tuple]:
    pairs = ((name, level) for name, level in found.items() if isinstance(name, tuple))
    return [(name[1], level) for name, level in pairs if name[0] == kind]


def _causes(found: Levels, world: int) -> Causes:
    ranks = dict(_of("rank", found))
    return Causes(
        found["overall"] * STEP,
        {name: level * STEP for name, level in _of("bucket", found)},
        {key: level * STEP for key, level in _of("key", found)},
        tuple(ranks.get(rank, 0) * STEP for rank in range(world)),
        0.0,
    )


def _correction(found: Levels, world: int, noise: int) -> PriceCorrection:
    ranks = dict(_of("rank", found))
    by_rank = tuple(ranks.get(rank, 0) for rank in range(world))
    return PriceCorrection(
        found["overall"],
        levels(_of("bucket", found)),
        levels(_of("key", found)),
        by_rank if any(by_rank) else (),
        noise,
    )


def describe(old: PriceCorrection, new: PriceCorrection) -> list[str]:
    """What a new version says, one line per cause that changed."""
    lines, advice = [], ", profile again (`strategy.request_profile()`)"
    if new.overall != old.overall:
        far = advice if abs(new.overall) >= ALARMING else ""
        lines.append(f"model drift: all prices are {factor_of(new.overall):.2f} times the profile's{far}")
    for title, before, after in (("bucket", old.buckets, new.buckets), ("key", old.keys, new.keys)):
        was, now = dict(before), dict(after)
        for name in sorted({*was, *now}, key=str):
            level = now.get(name, 0)
            if level != was.get(name, 0):
                far = advice if abs(level) >= ALARMING else ""
                what = name if title == "bucket" else " ".join(map(str, name))
                lines.append(
                    f"model drift: {title} {what} takes {factor_of(level):.2f} times its profile{far}"
                )
    world = max(len(old.ranks), len(new.ranks))
    rows = zip(old.ranks or (0,) * world, new.ranks or (0,) * world, strict=True)
    for rank, (present, level) in enumerate(rows):
        if level != present and level >= NOTABLE:
            times = f"takes {factor_of(level):.2f} times as long as other ranks for the same work"
            lines.append(f"straggler rank {rank}: {times}")
        elif level != present and present >= NOTABLE:
            lines.append(f"rank {rank} is no straggler any more")
    return lines


def neutral(correction: PriceCorrection) -> PriceCorrection:
    """What is left of a correction once prices were measured anew: what ranks differ in."""
    return replace(correction, overall=0, buckets=(), keys=())
