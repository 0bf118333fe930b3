"""Makes "zellige" and "zellige_fsdp2" known to Lightning's strategy registry, without importing Lightning.

Lightning has no entry point for strategies: a name is known once somebody calls its registry, which
exists only after Lightning was imported. So `arm()` registers at once where Lightning is loaded, and else
leaves a finder on `sys.meta_path` that registers right after the registry's module has run.

`lightning.pytorch` and `pytorch_lightning` are two copies of one library with separate registries, and
neither accepts the other's strategies. We build on the former; in the latter the name is registered with
an error that says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zellige_lightning.errors import ConfigError

if TYPE_CHECKING:
    from zellige_lightning.fsdp2 import ZelligeFSDP2Strategy
    from zellige_lightning.strategy import ZelligeStrategy

_DESCRIPTION = "Places whole and split sequences on ranks so that all finish together"


def make_strategy(**settings: Any) -> ZelligeStrategy:
    """What the registry calls for `strategy="zellige"`. The import waits until then, since the registry's
    module runs while the rest of Lightning is still half loaded."""
    from zellige_lightning.strategy import ZelligeStrategy

    return ZelligeStrategy(**settings)


def make_sharded_strategy(**settings: Any) -> ZelligeFSDP2Strategy:
    """As `make_strategy`, for `strategy="zellige_fsdp2"`."""
    from zellige_lightning.fsdp2 import ZelligeFSDP2Strategy

    return ZelligeFSDP2Strategy(**settings)


def refuse_other_namespace(**settings: Any) -> None:
    raise ConfigError(
        'a strategy "zellige" was asked of a Trainer of the package `pytorch_lightning`',
        fix="import Trainer and LightningModule from `lightning.pytorch`; the two packages do not mix",
    )


_STRATEGIES: dict[str, tuple[Callable[..., Any], str]] = {
    "zellige": (make_strategy, _DESCRIPTION),
    "zellige_fsdp2": (make_sharded_strategy, f"{_DESCRIPTION}; parameters are sharded"),
}
_REGISTRIES = {"lightning.pytorch.strategies": True, "pytorch_lightning.strategies": False}  # ours or not


def register() -> None:
    """Registers the names in every registry that is loaded. Calling it again changes nothing."""
    for module_name, ours in _REGISTRIES.items():
        registry = getattr(sys.modules.get(module_name), "StrategyRegistry", None)
        for name, (factory, description) in _STRATEGIES.items():
            if registry is not None and name not in registry:
                made = factory if ours else refuse_other_namespace
                registry.register(name, made, description=description)


def arm() -> None:
    """Registers now or, for a registry that is not loaded yet, when it is imported."""
    register()
    missing = any(not hasattr(sys.modules.get(name), "StrategyRegistry") for name in _REGISTRIES)
    if missing and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds nothing by itself: it only wraps the loader of a registry's module."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _REGISTRIES or self._searching:
            return None
        self._searching = True
        try:
            spec = find_spec(fullname)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Runs the module through its own loader, then registers, and leaves no trace of itself on the module."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        register()
