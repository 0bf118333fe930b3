"""Sequence placement for mixed image-video training, as a PyTorch Lightning strategy.

`import zellige_lightning` makes `Trainer(strategy="zellige")` work. It imports neither torch nor
Lightning: the public names below are loaded when first used, and the strategy is registered when
Lightning is there.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zellige_lightning import registration

if TYPE_CHECKING:
    from zellige_lightning.datamodule import ZelligeDataModule
    from zellige_lightning.fsdp2 import ZelligeFSDP2Strategy
    from zellige_lightning.mixin import CoalescedAttentionMixin
    from zellige_lightning.placement import Bucket, Catalog, Plan
    from zellige_lightning.planner.planner import PlannerConfig
    from zellige_lightning.profiler import HardwareProfiler
    from zellige_lightning.strategy import ZelligeStrategy

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "Catalog",
    "CoalescedAttentionMixin",
    "HardwareProfiler",
    "Plan",
    "PlannerConfig",
    "ZelligeDataModule",
    "ZelligeFSDP2Strategy",
    "ZelligeStrategy",
]

_HOME = {
    "Bucket": "zellige_lightning.placement",
    "Catalog": "zellige_lightning.placement",
    "CoalescedAttentionMixin": "zellige_lightning.mixin",
    "HardwareProfiler": "zellige_lightning.profiler",
    "Plan": "zellige_lightning.placement",
    "PlannerConfig": "zellige_lightning.planner.planner",
    "ZelligeDataModule": "zellige_lightning.datamodule",
    "ZelligeFSDP2Strategy": "zellige_lightning.fsdp2",
    "ZelligeStrategy": "zellige_lightning.strategy",
}

# In a checkout conf/ and recipes/ stand beside the package, in a wheel inside it. Python puts the current
# folder first on its path, so `python -m pytest` in the checkout meets the package without them.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "conf" / "__init__.py").is_file():
    __path__.append(str(_checkout))


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


registration.arm()
