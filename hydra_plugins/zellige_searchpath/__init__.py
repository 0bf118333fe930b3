"""Makes `strategy=zellige` and the group files of `zellige_lightning.conf` known to every Hydra application.

Hydra imports every module of the namespace package `hydra_plugins`, so this file is imported by
applications that never heard of us: it must stay cheap and imports neither torch nor Lightning.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from zellige_lightning import registration

registration.arm()

CONF = "pkg://zellige_lightning.conf"


class ZelligeSearchPath(SearchPathPlugin):
    """Appends the groups (`planner=paper`, `recipe=demo`, ...) behind those of the application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if all(element.path != CONF for element in search_path.get_path()):
            search_path.append(provider="zellige-lightning", path=CONF)
