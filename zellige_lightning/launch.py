"""Starts the other processes of a Hydra application, one output directory per job, in sweeps as well.

Lightning starts rank 1..N-1 by running the command line again. Under `--multirun` that is the whole
sweep: each child would walk all jobs in a sweep directory of its own. Here a child gets the overrides of
the one job that runs, in ordinary run mode, in the directory of that job. After a job, what it left in
the parent (environment variables, default process group) would make the next job believe that somebody
else starts its processes; it is cleared.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from zellige_lightning.errors import ConfigError, RankFailure

# What Lightning's launcher sets for a job and leaves behind.
_JOB_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Overrides that belong to the sweep or to the parent's own directory, not to a child.
_PARENT_OVERRIDES = (
    "hydra.mode=",
    "hydra.run.",
    "hydra.sweep",  # and hydra.sweeper
    "hydra.launcher",
    "hydra.output_subdir=",
    "hydra.job.name=",
    "hydra.job.num=",
    "hydra.job.id=",
    "hydra/launcher=",
    "hydra/sweeper=",
)
_LINGER_S = 60.0


class HydraSafeLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher of scripts, aware of Hydra's jobs. Without Hydra it is Lightning's."""

    # Environment and default process group belong to the process, so there is one such launcher in a process.
    _active: ClassVar[HydraSafeLauncher | None] = None

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._job_dir: str | None = None

    @staticmethod
    def end_previous_job() -> None:
        """Clears what an earlier job of this sweep left in this process. To be called before a strategy
        asks its cluster environment whether processes are started by somebody else. Nothing to do within
        one job."""
        previous = HydraSafeLauncher._active
        if previous is None or previous._job_dir == _job_dir():
            return
        previous._wait_for_children()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        for name in _JOB_VARIABLES:
            os.environ.pop(name, None)
        HydraSafeLauncher._active = None

    def _wait_for_children(self) -> None:
        """They need this process's store until they are done."""
        try:
            for child in self.procs:
                child.wait(timeout=_LINGER_S)
        except subprocess.TimeoutExpired as error:
            raise RankFailure(
                f"process {error.cmd} of the previous job still runs after {_LINGER_S:.0f} s",
                fix="run the jobs of this sweep one by one; see the log of that process",
            ) from None

    def _call_children_scripts(self) -> None:
        self._job_dir = _job_dir()
        if self._job_dir is None:
            super()._call_children_scripts()
            return
        self._check_can_spawn_children()
        self._export_job()
        self.procs = [self._start(local_rank) for local_rank in range(1, self.num_processes)]
        HydraSafeLauncher._active = self  # on this class, whatever the launcher's own is

    def _export_job(self) -> None:
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"] = environment.main_address
        os.environ["MASTER_PORT"] = str(environment.main_port)
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)

    def _start(self, local_rank: int) -> subprocess.Popen[Any]:
        from hydra.utils import get_original_cwd

        env = {**os.environ, "LOCAL_RANK": str(local_rank)}
        return subprocess.Popen(child_command(local_rank), env=env, cwd=get_original_cwd())


def child_command(local_rank: int) -> list[str]:
    """The command line of one more process of the running Hydra job.

    Raises:
        ConfigError: the application was not started from a script or module, so it cannot be started again.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    config = HydraConfig.get()
    kept = [item for item in config.overrides.hydra if not item.lstrip("+~").startswith(_PARENT_OVERRIDES)]
    job = [
        f"hydra.run.dir={_quoted(config.runtime.output_dir)}",
        f"hydra.job.name=train_ddp_process_{local_rank}",
        "hydra.output_subdir=null",
    ]
    # A configuration may refer to the number of its job, which an ordinary run does not have.
    given = [key for key in ("num", "id") if not OmegaConf.is_missing(config.job, key)]
    job += [f"hydra.job.{key}={getattr(config.job, key)}" for key in given]
    return [*_program(), *_config_flags(), *config.overrides.task, *kept, *job]


def _program() -> list[str]:
    from hydra.utils import to_absolute_path

    import __main__

    if __main__.__spec__ is not None:
        return [sys.executable, "-m", __main__.__spec__.name]
    script = to_absolute_path(sys.argv[0])
    if not Path(script).is_file():
        raise ConfigError(
            f"the other processes cannot be started: {sys.argv[0]!r} is not a script",
            fix="run the application as `python app.py`, `python -m app` or `zellige-train`, or use torchrun",
        )
    return [sys.executable, script]


def _config_flags() -> list[str]:
    """`--config-name` and its like, as they were given."""
    from hydra._internal.utils import get_args_parser

    args = get_args_parser().parse_args(sys.argv[1:])
    names = ("config_path", "config_name", "config_dir")
    return [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names if getattr(args, name)]


def _job_dir() -> str | None:
    """Output directory of the running Hydra job: what tells one job from the next. None without Hydra."""
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    return str(module.HydraConfig.get().runtime.output_dir)


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
