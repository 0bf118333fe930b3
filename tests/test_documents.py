"""Every command in the README and in docs is one that works: composed, parsed, or run elsewhere in the tests.

A line in a block of shell code that no checker below knows is an error, so that no document gets ahead of the
code. What DATA.md and WEIGHTS.md say is also run, in tests/recipes/data/test_documents.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig
from torch.distributed.run import get_args_parser

from zellige_lightning import plan_cli
from zellige_lightning.recipes.wan21 import encode_cli, export, inspect_cli

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = sorted((ROOT / "docs" / "examples").glob("*.sbatch"))


def shell_lines(text: str) -> list[str]:
    """Commands, with continued lines joined."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def commands(document: Path) -> list[str]:
    text = document.read_text(encoding="utf-8")
    return [
        line
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL)
        for line in shell_lines(block)
    ]


COMMANDS = [(path.name, line) for path in DOCUMENTS for line in commands(path)] + [
    (path.name, line) for path in SCRIPTS for line in shell_lines(path.read_text(encoding="utf-8"))
]


def train(words: list[str]) -> DictConfig:
    """Of a sweep, the first value stands for all."""
    sweep = "-m" in words or "--multirun" in words
    overrides = [
        w.split(",")[0] if sweep else w for w in words if w not in ("-m", "--multirun", "--cfg", "job")
    ]
    with initialize_config_module("zellige_lightning.conf", version_base="1.3"):
        config = compose("train", overrides=overrides)
    assert config.model is not None and config.data is not None
    return config


def make(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(words) <= set(targets)


def python(words: list[str]) -> None:
    """A module of ours with its arguments, or a script that is there."""
    if words[0] == "-m" and words[1] in MODULES:
        MODULES[words[1]](words[2:])
    elif words[0] == "-m":
        assert words[1] in ("pytest", "pip"), f"python -m {words[1]}"
    else:
        assert (ROOT / words[0]).is_file()


def torchrun(words: list[str]) -> None:
    """Checks torchrun's own options, then what it runs."""
    options = get_args_parser().parse_args(words)
    python((["-m"] if options.module else []) + [options.training_script, *options.training_script_args])


def srun(words: list[str]) -> None:
    start = next(i for i, word in enumerate(words) if word in CHECKERS)
    CHECKERS[words[start]](words[start + 1 :])


def sbatch(words: list[str]) -> None:
    assert [ROOT / words[-1]] == [path for path in SCRIPTS if path.name == Path(words[-1]).name]


def pip(words: list[str]) -> None:
    """Our extras by name; anything else is a package of somebody else."""
    extras = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for names in re.findall(r"zellige-lightning\[([\w,-]+)\]", " ".join(words)):
        assert all(re.search(rf"^{name} = \[", extras, re.MULTILINE) for name in names.split(","))


MODULES: dict[str, Callable[[list[str]], object]] = {
    "zellige_lightning.cli": train,
    "zellige_lightning.plan_cli": lambda words: plan_cli._parser().parse_args(words),
    "zellige_lightning.recipes.wan21.encode_cli": lambda words: encode_cli._parser().parse_args(words),
}
CHECKERS: dict[str, Callable[[list[str]], object]] = {
    "zellige-train": train,
    "zellige-plan": lambda words: plan_cli._parser().parse_args(words),
    "zellige-inspect": lambda words: inspect_cli._parser().parse_args(words),
    "zellige-encode": lambda words: encode_cli._parser().parse_args(words),
    "zellige-export": lambda words: export._parser().parse_args(words),
    **{"make": make, "python": python, "torchrun": torchrun, "srun": srun, "sbatch": sbatch, "pip": pip},
}


@pytest.mark.parametrize(("document", "line"), COMMANDS, ids=[f"{name}: {line}" for name, line in COMMANDS])
def test_a_command_of_a_document_works(document: str, line: str) -> None:
    program, *words = shlex.split(line, comments=True)
    assert program in CHECKERS, f"{document} says {program!r}, which no test here can check"
    CHECKERS[program](words)


def test_there_are_commands_of_every_kind() -> None:
    assert {shlex.split(line, comments=True)[0] for _, line in COMMANDS} >= set(CHECKERS) - {"python", "pip"}
    assert len(COMMANDS) > 25


def test_what_a_document_links_to_exists() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_cluster_script_asks_for_the_ranks_that_it_trains_on(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)", text, re.MULTILINE))
    (line,) = shell_lines(text)
    config = train(shlex.split(line)[2:])
    assert int(asked["nodes"]) == config.trainer.num_nodes
    assert int(asked["ntasks-per-node"]) == int(asked["gpus-per-node"]) == config.trainer.devices
    assert asked["signal"].startswith("TERM@")
    assert config.callbacks.checkpoint.save_on_exception and config.ckpt_path == "last"
