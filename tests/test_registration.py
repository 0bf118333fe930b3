"""Both names are known to Lightning, whoever is imported first; each order in its own process."""

from __future__ import annotations

import subprocess
import sys

import pytest

SHOW = """
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import StrategyRegistry
for name in ("zellige", "zellige_fsdp2"):
    trainer = Trainer(strategy=name, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    print("names", StrategyRegistry.available_strategies().count(name), type(trainer.strategy).__name__)
"""

# Registering again is harmless, and the finder leaves no trace on the module that it watched.
AGAIN = """
import sys
from zellige_lightning import registration
registration.arm(); registration.arm()
assert sum(type(f).__module__ == registration.__name__ for f in sys.meta_path) == 1, sys.meta_path
import lightning.pytorch.strategies as strategies
registration.register(); registration.arm(); registration.register()
loaders = {type(strategies.__spec__.loader).__name__, type(strategies.__loader__).__name__}
assert loaders == {"SourceFileLoader"}, loaders
"""

ORDERS = {
    "lightning first": "import lightning.pytorch, zellige_lightning",
    "package first": "import zellige_lightning" + AGAIN,
    "strategy first": "from zellige_lightning.strategy import ZelligeStrategy",
    "sharded strategy first": "from zellige_lightning.fsdp2 import ZelligeFSDP2Strategy",
}


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("order", ORDERS)
def test_the_name_is_known(order: str) -> None:
    done = run(ORDERS[order] + SHOW)
    assert done.returncode == 0, done.stderr
    assert "names 1 ZelligeStrategy" in done.stdout
    assert "names 1 ZelligeFSDP2Strategy" in done.stdout


def test_importing_the_package_is_cheap() -> None:
    done = run(
        "import sys, zellige_lightning\n"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'ortools', 'numpy', 'hydra', 'matplotlib'}\n"
        "print('loaded', sorted(heavy & set(sys.modules)))"
    )
    assert done.stdout.strip() == "loaded []", done.stderr


def test_the_other_package_of_lightning_is_told_so() -> None:
    pytest.importorskip("pytorch_lightning")
    done = run(
        "import zellige_lightning\n"
        "from pytorch_lightning import Trainer\n"
        "Trainer(strategy='zellige', accelerator='cpu', devices=1, logger=False)"
    )
    assert done.returncode != 0
    assert "ConfigError" in done.stderr
    assert "from `lightning.pytorch`" in done.stderr


def test_public_names() -> None:
    import zellige_lightning

    assert set(zellige_lightning.__all__) <= set(dir(zellige_lightning))
    for name in zellige_lightning.__all__:
        assert getattr(zellige_lightning, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = zellige_lightning.Nothing
