"""The profile file: one JSON object, checked field by field on the way in."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zellige_lightning.errors import ProfileError, ZelligeError
from zellige_lightning.placement.plan import WHOLE, ParallelConfig
from zellige_lightning.placement.sequence import Bucket

if TYPE_CHECKING:
    from zellige_lightning.planner.cost import PriceKey, ProfileTable, StartKey

FORMAT = "zellige-profile-3"
MAX_BYTES = 16 << 20
MAX_US = 1 << 42  # 50 days: anything above is damage, and sums of prices stay far inside 63 bits
_REDO = "delete the file and let the profiler measure again"
_FIELDS = {
    "format",
    "buckets",
    "prices_us",
    "extrapolated_us",
    "fixed_us",
    "fingerprint",
    "spread_us",
    "interpolated",
    "start_us",
    "split_scale",
    "overhead_scale",
}


def price_text(table: ProfileTable) -> str:
    """Canonical JSON of the prices alone."""
    prices = [[*_key_row(key), us] for key, us in table.prices_us.items()]
    return json.dumps(
        {
            "buckets": [[b.name, list(b.grid)] for b in table.buckets],
            "prices_us": sorted(prices),
            "extrapolated_us": dict(sorted(table.extrapolated_us.items())),
            "fixed_us": table.fixed_us,
            "start_us": sorted([*_class_row(key), us] for key, us in table.start_us.items()),
            "split_scale": table.split_scale,
            "overhead_scale": table.overhead_scale,
        }
    )


def to_json(table: ProfileTable) -> str:
    about = {
        "format": FORMAT,
        "fingerprint": dict(table.fingerprint),
        "spread_us": sorted([*_key_row(key), us] for key, us in table.spread_us.items()),
        "interpolated": sorted(map(_key_row, table.interpolated)),
    }
    return json.dumps(about | json.loads(price_text(table)))


def _key_row(key: PriceKey) -> list[Any]:
    return [key[0], *_class_row(key[1:])]


def _class_row(key: StartKey) -> list[Any]:
    config, where = key
    return [[config.q, config.h, config.k], where]


def _key(row: list[Any]) -> PriceKey:
    name, *rest = row
    return _str(name), *_class(rest)


def _class(row: list[Any]) -> StartKey:
    factors, where = row
    if not all(isinstance(factor, int) and not isinstance(factor, bool) for factor in factors):
        raise TypeError(f"split factors {factors!r} are no integers")
    return ParallelConfig(*factors), _str(where)


def parse(text: str) -> dict[str, Any]:
    """The constructor arguments of a `ProfileTable`. Raises: ProfileError."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # also an integer of thousands of digits
        raise ProfileError(f"the profile is not JSON: {error}", fix=_REDO) from error
    if not isinstance(data, dict) or data.get("format") != FORMAT or set(data) != _FIELDS:
        raise ProfileError(
            f"the profile is not a {FORMAT!r} object with the fields {sorted(_FIELDS)}", fix=_REDO
        )
    try:
        buckets = tuple(Bucket(_str(name), tuple(grid)) for name, grid in data["buckets"])
        prices = {_key(row): us for *row, us in data["prices_us"]}
        spread = {_key(row): us for *row, us in data["spread_us"]}
        interpolated = frozenset(map(_key, data["interpolated"]))
        starts = {_class(row): us for *row, us in data["start_us"]}
        extrapolated, fingerprint = dict(data["extrapolated_us"]), dict(data["fingerprint"])
    except (TypeError, ValueError, ZelligeError) as error:
        raise ProfileError(f"the profile has a damaged entry: {error}", fix=_REDO) from error
    if len(prices) != len(data["prices_us"]) or len(starts) != len(data["start_us"]):
        raise ProfileError("the profile has two prices for one option", fix=_REDO)
    return {
        "buckets": buckets,
        "prices_us": prices,
        "extrapolated_us": extrapolated,
        "fixed_us": data["fixed_us"],
        "fingerprint": fingerprint,
        "spread_us": spread,
        "interpolated": interpolated,
        "start_us": starts,
        "split_scale": data["split_scale"],
        "overhead_scale": data["overhead_scale"],
    }


def _refuse_constant(name: str) -> float:
    raise ProfileError(f"the profile contains {name}", fix=_REDO)


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _check_us(what: str, value: Any, low: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= MAX_US:
        raise ProfileError(
            f"{what} is {value!r}", fix=f"prices are integers in microseconds, {low} to {MAX_US}; {_REDO}"
        )


def check(table: ProfileTable) -> None:
    """What every table must satisfy. Raises: ProfileError."""
    names = {b.name for b in table.buckets}
    if not names or len(names) != len(table.buckets):
        raise ProfileError("the profile has no bucket, or two of one name", fix=_REDO)
    _check_us("the fixed step cost", table.fixed_us, low=0)
    for key, price in table.prices_us.items():
        if key[0] not in names:
            raise ProfileError(f"the profile prices the unknown bucket {key[0]!r}", fix=_REDO)
        _check_us(f"the price of bucket {key[0]!r} under {key[1]} on {key[2]!r}", price)
    for name, price in table.extrapolated_us.items():
        _check_us(f"the extrapolated price of bucket {name!r}", price)
    for name in names:
        if (name, WHOLE, "node") not in table.prices_us and name not in table.extrapolated_us:
            raise ProfileError(f"bucket {name!r} has no whole-sequence price", fix=_REDO)
    if unknown := set(table.extrapolated_us) - names:
        raise ProfileError(f"extrapolated prices of unknown buckets {sorted(unknown)}", fix=_REDO)
    for key, spread in table.spread_us.items():
        _check_us(f"the spread of the price of {key[0]!r} under {key[1]} on {key[2]!r}", spread, low=0)
    if unpriced := sorted(k[0] for k in (set(table.spread_us) | table.interpolated) - set(table.prices_us)):
        raise ProfileError(f"the profile describes prices of {unpriced} that it does not have", fix=_REDO)
    for (config, where), start in table.start_us.items():
        if config.is_whole or not config.is_packed:
            raise ProfileError(
                f"the profile has a start of {config}, whose sequences share no call", fix=_REDO
            )
        _check_us(f"the start of {config} on {where!r}", start, low=0)
    for name in ("split_scale", "overhead_scale"):
        scale = getattr(table, name)
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0.01 <= scale <= 100.0:
            raise ProfileError(f"{name} of the profile is {scale!r}", fix=_REDO)
    for entry, value in table.fingerprint.items():
        finite = not isinstance(value, float) or math.isfinite(value)
        if not isinstance(entry, str) or not isinstance(value, str | int | float) or not finite:
            raise ProfileError(f"fingerprint entry {entry!r} is {value!r}", fix=_REDO)


def check_fingerprint(found: Mapping[str, Any], expected: Mapping[str, Any], path: str) -> None:
    """Raises: ProfileError naming every key that differs, with both values."""
    keys = sorted(set(found) | set(expected))
    differ = [k for k in keys if found.get(k) != expected.get(k)]
    if differ:
        rows = ", ".join(f"{k}: {found.get(k)!r} in the file, {expected.get(k)!r} here" for k in differ)
        raise ProfileError(
            f"the profile {path} was measured for another job ({rows})",
            fix="give this job its own profile path, or delete the file and let the profiler measure again",
        )


def read(path: Path) -> str:
    """Text of the file, size first. Raises: ProfileError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ProfileError(f"the profile {path} is larger than {MAX_BYTES} bytes", fix=_REDO)
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProfileError(f"the profile {path} cannot be read: {error}", fix=_REDO) from error


def write_atomically(path: Path, text: str) -> None:
    """Raises: ProfileError where the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ProfileError(
            f"the profile {path} cannot be written: {error}", fix="choose a writable profile path"
        ) from error
