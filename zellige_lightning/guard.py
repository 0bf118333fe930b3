"""Launchers whose processes raise one error together: the widest place to catch a failure, before any
callback's `on_exception` could wait for ranks that have stopped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from zellige_lightning.launch import HydraSafeLauncher

if TYPE_CHECKING:
    from zellige_lightning.placing import PlacingStrategy


class GuardedScriptLauncher(HydraSafeLauncher):
    """Starts the script again for each further process."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return super().launch(partial(run_guarded, trainer, function), *args, trainer=trainer, **kwargs)


class GuardedProcessLauncher(_MultiProcessingLauncher):
    """Spawns or forks each process."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        return super().launch(partial(_run_in_process, function), *args, trainer=trainer, **kwargs)


def launcher_for(strategy: PlacingStrategy, start_method: str) -> Any:
    """The launcher of a start method: `popen`, `spawn`, `fork` or `forkserver`."""
    if start_method == "popen":
        assert strategy.cluster_environment is not None
        HydraSafeLauncher.end_previous_job()
        return GuardedScriptLauncher(strategy.cluster_environment, strategy.num_processes, strategy.num_nodes)
    return GuardedProcessLauncher(strategy, start_method=start_method)  # type: ignore[arg-type]


def _run_in_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A trainer's method that was pickled for the process carries the trainer of that process.
    return run_guarded(function.__self__, function, *args, **kwargs)  # type: ignore[attr-defined]


def run_guarded(trainer: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function`, with its error replaced by the one that all ranks raise."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        resolved = trainer.strategy.resolve_failure(error)
        if resolved is error:
            raise
        raise resolved from error
