"""From configuration nodes to objects: the only place that turns the text of a `_target_` into a call.

A configuration may come from anywhere, and `_target_` can name any callable of any package. So all names are
checked before anything is imported, and what a name leads to is checked again before it is called.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from zellige_lightning.errors import ConfigError

ALLOWED_PACKAGES = ("zellige_lightning", "lightning.pytorch", "torch.optim")
_TARGET, _PARTIAL = "_target_", "_partial_"


def instantiate(node: DictConfig, where: str, **extra: Any) -> Any:
    """The object that `node` describes, with everything nested in it.

    Args:
        where: path of the node in the configuration, for messages.
        extra: further arguments, ready made.

    Raises:
        ConfigError: a value is missing, a `_target_` is not allowed or does not exist, or it has no such
            argument.
    """
    settings = resolved(node, where)
    check_targets(settings, where)
    return _build(settings | extra, where)


def instantiate_all(group: DictConfig | None, where: str) -> list[Any]:
    """The objects of a group of named nodes, in order. A node set to null is left out."""
    if group is None:
        return []
    return [instantiate(group[name], f"{where}.{name!s}") for name in group if group[name] is not None]


def resolved(node: DictConfig, where: str) -> dict[str, Any]:
    """Plain containers, interpolations resolved. Raises: ConfigError for a value that was not given."""
    try:
        settings = OmegaConf.to_container(node, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise ConfigError(f"{error.full_key} has no value", fix=f"add {error.full_key}=<value>") from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {error}", fix="correct the interpolation") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{where} is {settings!r}", fix=f"{where} must be a group of settings")
    return {str(key): value for key, value in settings.items()}


def check_targets(settings: Any, where: str) -> None:
    """Check every target in plain containers, and its arguments. Raises: ConfigError."""
    nodes = list(_nodes(settings, where))
    for path, node in nodes:
        _check_name(path, node[_TARGET])
    for path, node in nodes:
        _check_arguments(path, node)


def _nodes(value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, node) of every node that names a target."""
    if isinstance(value, dict):
        if _TARGET in value:
            yield where, value
        for key, child in value.items():
            yield from _nodes(child, f"{where}.{key}")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _nodes(child, f"{where}[{index}]")


def _is_allowed(name: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in ALLOWED_PACKAGES)


def _check_name(where: str, target: Any) -> None:
    parts = target.split(".") if isinstance(target, str) else []
    if not parts or not _is_allowed(target) or not all(p.isidentifier() and p[0] != "_" for p in parts):
        raise ConfigError(
            f"{where}._target_={target!r} is not allowed",
            fix=f"a configuration may name classes of {', '.join(ALLOWED_PACKAGES)}; for your own classes"
            " write a script of your own (docs/BRING_YOUR_OWN_MODEL.md)",
        )


def _callable(where: str, target: str) -> Callable[..., Any]:
    try:
        found = pkgutil.resolve_name(target)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"{where}._target_={target!r}: {error}", fix="correct the name") from error
    # An allowed module may have imported a foreign one: `lightning.pytorch.trainer.trainer.os.system`.
    if not callable(found) or not _is_allowed(getattr(found, "__module__", None) or ""):
        raise ConfigError(
            f"{where}._target_={target!r} is not allowed",
            fix="name a class or function that an allowed package defines itself",
        )
    return found


def _check_arguments(where: str, node: dict[str, Any]) -> None:
    parameters = inspect.signature(_callable(where, node[_TARGET])).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    if unknown := sorted(set(node) - {_TARGET, _PARTIAL} - set(parameters)):
        raise ConfigError(
            f"{where} has no setting {unknown}", fix=f"legal keys of {where}: {sorted(parameters)}"
        )


def _build(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return [_build(child, f"{where}[{index}]") for index, child in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if _TARGET not in value:
        return {key: _build(child, f"{where}.{key}") for key, child in value.items()}
    function = _callable(where, value[_TARGET])
    arguments = {k: _build(v, f"{where}.{k}") for k, v in value.items() if k not in (_TARGET, _PARTIAL)}
    if value.get(_PARTIAL):
        return partial(function, **arguments)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}", fix=f"add {where}.<name>=<value>") from None
    try:
        return function(**arguments)
    except ModuleNotFoundError as error:  # loggers need packages of their own
        raise ConfigError(
            f"{where} needs a package that is not installed: {error}",
            fix="install it, or choose another option",
        ) from error
