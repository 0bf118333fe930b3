"""What the README shows is right; its commands are checked with those of all documents."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_quickstart_is_python_and_short() -> None:
    (quickstart,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    compile(quickstart, "README.md", "exec")
    assert len(quickstart.strip().splitlines()) <= 20


def test_continuous_integration_runs_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in script
    assert "make test" in README
