"""Where a checkpoint keeps the position in the data: under a key of our own.

Lightning keeps it among the states of the loaders and refuses a checkpoint whose loaders are not those of
the run, so that no other strategy could go on from ours.
"""

from __future__ import annotations

from typing import Any

KEY = "zellige"


def set_apart(checkpoint: dict[str, Any]) -> None:
    """Move the position to `checkpoint["zellige"]["position"]`."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if states := loop.get("combined_loader"):
        loop["combined_loader"] = []
        checkpoint[KEY] = {"position": states[0]}


def position_in(checkpoint: dict[str, Any]) -> dict[str, int] | None:
    """{"epoch", "delivered"}, or None in a checkpoint of another strategy."""
    ours = checkpoint.get(KEY)
    return ours["position"] if isinstance(ours, dict) else None
