"""Who may import whom: the floors of docs/ARCHITECTURE.md, held by walking the import statements."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import zellige_lightning

PACKAGE = Path(zellige_lightning.__file__).parent
SURFACE = {
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "hydra",
    "omegaconf",
    "matplotlib",
}  # floor 3
BELOW = ("placement", "planner", "engine", "simulator", "sources", "batch.py", "errors.py")  # floors 1 and 2
FORBIDDEN = {
    "placement": {"torch", "numpy", "ortools", "zellige_lightning.planner", "zellige_lightning.engine"},
    "planner": {"torch", "zellige_lightning.engine", "zellige_lightning.batch", "zellige_lightning.sources"},
    "simulator": {"torch", "zellige_lightning.engine"},
    "engine": {"zellige_lightning.planner"},
    "errors.py": {"torch", "numpy", "ortools"},
}


def python_files(part: str) -> list[Path]:
    path = PACKAGE / part
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative imports hide the floor"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def breaches(part: str, forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in python_files(part)
        for name in sorted(imports(path))
        if any(name == f or name.startswith(f"{f}.") for f in forbidden)
    ]


@pytest.mark.parametrize("part", BELOW)
def test_nothing_below_floor_3_imports_lightning_hydra_or_matplotlib(part: str) -> None:
    above = {
        f"zellige_lightning.{name}"
        for name in ("strategy", "datamodule", "mixin", "profiler", "cli", "report")
    }
    assert breaches(part, SURFACE | above) == []


@pytest.mark.parametrize("part", FORBIDDEN)
def test_floors_one_and_two(part: str) -> None:
    assert breaches(part, FORBIDDEN[part]) == []


def test_placement_needs_the_standard_library_alone() -> None:
    import sys

    for path in python_files("placement"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert roots <= set(sys.stdlib_module_names) | {"zellige_lightning"}, path


def test_the_walk_sees_imports() -> None:
    assert "zellige_lightning.placement.plan.Plan" in imports(PACKAGE / "planner" / "assemble.py")
    assert breaches("planner", {"ortools"}) == [
        "planner/anchors.py imports ortools.sat.python.cp_model",
        "planner/policies/slots.py imports ortools.sat.python.cp_model",
    ]
