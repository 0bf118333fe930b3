"""`zellige-train`: a training run from the configuration tree in `conf/`."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from typing import Any

import hydra
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig
from omegaconf.errors import ConfigKeyError

from zellige_lightning.errors import ConfigError


@hydra.main(version_base="1.3", config_path="pkg://zellige_lightning.conf", config_name="train")
def _application(config: DictConfig) -> dict[str, Any]:
    from zellige_lightning.recipes.train import train

    return train(config)


def main() -> None:
    """Entry point of `zellige-train`. A mistake in the configuration ends in one message."""
    # Hydra then raises its errors instead of printing a shortened traceback, so that we can say more.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    try:
        _application()
    except ConfigCompositionException as error:
        _leave(explain(error))
    except ConfigError as error:
        _leave(error)


def _leave(error: ConfigError) -> None:
    sys.exit(f"ConfigError: {error}")


def explain(error: ConfigCompositionException) -> ConfigError:
    """The same mistake as a `ConfigError`; for a key that does not exist with the keys that do."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, ConfigKeyError | AttributeError):
        cause = cause.__cause__
    parent = getattr(cause, "parent_node", None)
    if cause is None or not isinstance(parent, DictConfig):
        return ConfigError(str(error).strip() or str(error.__cause__))
    key, full_key = str(getattr(cause, "key", "")), str(getattr(cause, "full_key", ""))
    return _unknown_key(key, full_key, [str(name) for name in parent if name != "hydra"])


def _unknown_key(key: str, full_key: str, legal: list[str]) -> ConfigError:
    node = full_key.rpartition(".")[0]
    close = get_close_matches(key, legal, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    if not legal:
        return ConfigError(
            f"there is no setting {full_key}", fix=f"{node or 'this node'} takes a value, it has no keys"
        )
    return ConfigError(
        f"there is no setting {full_key}",
        fix=f"{hint}legal keys{f' of {node}' if node else ''}: {', '.join(sorted(legal))}",
    )


if __name__ == "__main__":
    main()
