"""Settings of the running Hydra application, for a strategy that was named by a bare string."""

from __future__ import annotations

import sys
from typing import Any

from zellige_lightning.errors import ConfigError


def settings_from_hydra(name: str) -> dict[str, Any] | None:
    """The top-level node `name` (`planner`, `engine`, `profiler`) of the running Hydra application, resolved.

    None where no Hydra application runs or where it has no such node. A string cannot carry settings, so
    this is how `trainer.strategy=zellige +planner=paper planner.epsilon=0.01` reaches the strategy in
    anybody's application.

    Raises:
        ConfigError: the node is there and is not a mapping.
    """
    # An application that runs under Hydra has loaded this module; without it, importing Hydra would be in
    # vain.
    module = sys.modules.get("hydra.core.hydra_config")
    if module is None or not module.HydraConfig.initialized():
        return None
    from omegaconf import DictConfig, OmegaConf

    # Hydra hides the application's own configuration behind its `hydra` node, as the parent of that node.
    application = module.HydraConfig.instance().cfg.hydra._get_parent()
    node = OmegaConf.select(application, name) if application is not None else None
    if node is None:
        return None
    if not isinstance(node, DictConfig):
        raise ConfigError(
            f"the setting `{name}` of this Hydra application is {node!r}",
            fix=f"`{name}` must be a group of settings; add `+{name}=<option>` or rename your own setting",
        )
    settings = OmegaConf.to_container(node, resolve=True)
    assert isinstance(settings, dict)
    return {str(key): value for key, value in settings.items()}
