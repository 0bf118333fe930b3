"""What the README tells people to type is right."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^zellige-train (.*?)(?:\s+#.*)?$", README, flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command: str) -> None:
    overrides = [word for word in shlex.split(command) if word not in ("-m", "--cfg", "job")]
    with initialize_config_module("zellige_lightning.conf", version_base="1.3"):
        # Of a sweep, the first value stands for all.
        config = compose("train", overrides=[override.split(",")[0] for override in overrides])
    assert config.model is not None


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 5


def test_the_quickstart_is_python_and_short() -> None:
    (quickstart,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    compile(quickstart, "README.md", "exec")
    assert len(quickstart.strip().splitlines()) <= 20


def test_the_make_targets_exist() -> None:
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    assert set(re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE)) <= targets


def test_linked_documents_exist() -> None:
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / link).is_file(), link


def test_continuous_integration_runs_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in script
    assert "make test" in README
