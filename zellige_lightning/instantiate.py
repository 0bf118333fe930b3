"""From configuration nodes to objects: the only place that turns the text of a `_target_` into a call.

A configuration may come from anywhere, and `_target_` can name any callable of any package. So the names
are checked before anything is imported, and what a name leads to is checked again before it is called.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from zellige_lightning.errors import ConfigError, ZelligeError

ALLOWED_PACKAGES = ("zellige_lightning", "lightning.pytorch", "torch.optim")
_HYDRA_KEYS = {"_target_", "_partial_", "_convert_", "_recursive_", "_args_"}


def instantiate(node: DictConfig, where: str, **extra: Any) -> Any:
    """The object that `node` describes, with everything nested in it.

    Args:
        where: path of the node in the configuration, for messages.
        extra: further arguments, ready made.

    Raises:
        ConfigError: a value is missing, a `_target_` is not allowed or does not exist, or it has no such
        argument. ZelligeError: whatever of ours the called object raised.
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydra_instantiate

    settings = resolved(node, where)
    for path, target, keys in list(_targets(settings, where)):
        _check_name(path, target)
        _check_arguments(path, target, keys)
    try:
        return hydra_instantiate(settings, _convert_="all", **extra)
    except InstantiationException as error:
        raise _own_cause(error) or error from None


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


def _targets(value: Any, where: str) -> Iterator[tuple[str, Any, set[str]]]:
    """(path, target, argument names) of every node that names a target."""
    if isinstance(value, dict):
        if "_target_" in value:
            yield where, value["_target_"], set(value) - _HYDRA_KEYS
        for key, child in value.items():
            yield from _targets(child, f"{where}.{key}")
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _targets(child, f"{where}[{index}]")


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


def _check_arguments(where: str, target: str, keys: set[str]) -> None:
    try:
        callable_ = pkgutil.resolve_name(target)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"{where}._target_={target!r}: {error}", fix="correct the name") from error
    # An allowed module may have imported a foreign one, such as
    # `lightning.pytorch.trainer.trainer.os.system`.
    if not callable(callable_) or not _is_allowed(getattr(callable_, "__module__", None) or ""):
        raise ConfigError(f"{where}._target_={target!r} is not a class or function of an allowed package")
    parameters = inspect.signature(callable_).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    if unknown := sorted(keys - set(parameters)):
        raise ConfigError(
            f"{where} has no setting {unknown}", fix=f"legal keys of {where}: {sorted(parameters)}"
        )


def _own_cause(error: BaseException) -> ZelligeError | None:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ZelligeError):
        cause = cause.__cause__ or cause.__context__
    return cause
