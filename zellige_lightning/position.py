"""Where a checkpoint keeps the position in the data: under a key of our own.

Lightning keeps it among the states of the loaders and refuses a checkpoint whose loaders are not those of
the run, so that no other strategy could go on from ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zellige_lightning.placement import Bucket
from zellige_lightning.planner.deferral import Deferred

KEY = "zellige"


def set_apart(
    checkpoint: dict[str, Any],
    deferred: tuple[Deferred, ...] = (),
    prices: Mapping[str, Any] | None = None,
    tokens_per_batch: int | None = None,
) -> None:
    """Move the position to `checkpoint["zellige"]["position"]`, beside what waits for the next batch, what
    was learnt of prices, and the token budget of a global batch, without which no position means anything."""
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    loop = fit.get("state_dict", {})
    states = loop.get("combined_loader")
    if states and isinstance(states[0], dict) and set(states[0]) == {"epoch", "delivered"}:
        loop["combined_loader"] = []
        _reopen(fit, states[0]["epoch"])
        checkpoint[KEY] = {"position": states[0]}
        if tokens_per_batch is not None:
            checkpoint[KEY]["tokens_per_batch"] = tokens_per_batch
        if prices:
            checkpoint[KEY]["prices"] = dict(prices)
        if deferred:
            checkpoint[KEY]["deferred"] = [[key, bucket.name, list(bucket.grid)] for key, bucket in deferred]


def _reopen(fit: dict[str, Any], epoch: int) -> None:
    """Lightning counts an epoch that a fit broke off, at `max_steps` say, as done, and would skip the
    rest."""
    progress = fit["epoch_progress"]
    if progress["current"]["processed"] > epoch and not fit["epoch_loop.batch_progress"]["is_last_batch"]:
        for counts in (progress["total"], progress["current"]):
            counts["processed"] -= 1
            counts["completed"] = counts["processed"]


def position_in(checkpoint: dict[str, Any]) -> dict[str, int] | None:
    """{"epoch", "delivered"}, or None in a checkpoint of another strategy."""
    ours = checkpoint.get(KEY)
    return ours["position"] if isinstance(ours, dict) else None


def budget_in(checkpoint: dict[str, Any]) -> int | None:
    """Tokens of a global batch, where the checkpoint tells them."""
    ours = checkpoint.get(KEY)
    return ours.get("tokens_per_batch") if isinstance(ours, dict) else None


def prices_in(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What was learnt of prices; empty where nothing was."""
    ours = checkpoint.get(KEY)
    found = ours.get("prices") if isinstance(ours, dict) else None
    return found if isinstance(found, dict) else {}


def deferred_in(checkpoint: dict[str, Any]) -> tuple[Deferred, ...]:
    """What waited for the batch after the checkpoint."""
    ours = checkpoint.get(KEY)
    waiting = ours.get("deferred", []) if isinstance(ours, dict) else []
    return tuple((key, Bucket(name, tuple(grid))) for key, name, grid in waiting)
