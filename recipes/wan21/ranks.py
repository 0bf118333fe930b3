"""Which of several encoding processes this is: from torchrun, from SLURM, or from the options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from zellige_lightning.errors import ConfigError


@dataclass(frozen=True)
class Rank:
    """Process `rank` of `world_size`; `local_rank` on its machine, which names its GPU."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} of {self.world_size}", fix="ranks count from 0 to the world size - 1"
            )


# (rank, world size, local rank). SLURM sets the number of a step's tasks only for tasks that srun started: a
# batch script without srun is one process, however many tasks its job has.
_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def find_rank(
    rank: int | None = None, world_size: int | None = None, environment: Mapping[str, str] = os.environ
) -> Rank:
    """The options if given, else what the launcher says, else a single process. Raises: ConfigError."""
    if (rank is None) != (world_size is None):
        raise ConfigError("--rank and --world-size belong together", fix="give both or none")
    if rank is not None and world_size is not None:
        return Rank(rank, world_size)
    for names in _VARIABLES:
        if names[0] in environment and names[1] in environment:
            try:
                return Rank(*(int(environment.get(name, "0")) for name in names))
            except ValueError as error:
                raise ConfigError(f"{names[0]} or {names[1]} is no number", fix="unset them") from error
    return Rank()
