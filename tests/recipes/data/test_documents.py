"""What docs/DATA.md and docs/WEIGHTS.md tell people to type is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.recipes.data.files import captioned, write_clip, write_image
from tests.recipes.packing import random_model
from zellige_lightning.recipes.wan21 import encode_cli, export, inspect_cli
from zellige_lightning.recipes.wan21.config import CONFIGS
from zellige_lightning.recipes.wan21.encoded_store import EncodedStore
from zellige_lightning.recipes.wan21.layouts import ORIGINAL
from zellige_lightning.recipes.wan21.weights import save_weights

DOCS = Path(__file__).resolve().parents[3] / "docs"
MODULES = {"zellige-inspect": inspect_cli, "zellige-encode": encode_cli, "zellige-export": export}


def commands(document: str) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", (DOCS / document).read_text(), flags=re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if line]


ALL = [words for document in ("DATA.md", "WEIGHTS.md") for words in commands(document)]


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files that the documents speak of."""
    monkeypatch.chdir(tmp_path)
    media = tmp_path / "media"
    media.mkdir()
    for i in range(3):
        captioned(write_image(media / f"{i}.png", (256, 256), seed=i))
    captioned(write_clip(media / "clip.mp4", 24))
    rows = ["video,caption", *(f"{i}.png,picture {i}" for i in range(3))]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    model = random_model(CONFIGS["tiny"], torch.float32)
    save_weights("Wan2.1-T2V-1.3B", model.config, model.state_dict(), layout=ORIGINAL)
    state = {f"model.{name}": values for name, values in model.state_dict().items()}
    torch.save({"state_dict": state, "current_model_state": state}, "run.ckpt")
    return tmp_path


def test_there_are_commands_of_every_kind() -> None:
    programs = {words[0] for words in ALL}
    assert programs == {*MODULES, "zellige-train", "torchrun", "srun"}
    assert len(ALL) >= 12


@pytest.mark.parametrize(
    "words", [w for w in ALL if w[0] in MODULES and "Wan-AI" not in str(w)], ids=" ".join
)
def test_commands_run(words: list[str], sandbox: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MODULES[words[0]].main(words[1:])  # type: ignore[attr-defined]
    assert capsys.readouterr().out


@pytest.mark.parametrize("words", [w for w in ALL if w[0] == "srun" or "Wan-AI" in str(w)], ids=" ".join)
def test_commands_for_clusters_and_published_weights_parse(words: list[str]) -> None:
    args = encode_cli._parser().parse_args(words[words.index("zellige-encode") + 1 :])
    assert args.vae == args.text != "demo"


@pytest.mark.slow
def test_torchrun_runs(sandbox: Path) -> None:
    (words,) = (w for w in ALL if w[0] == "torchrun")
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert len(EncodedStore("latents-2")) == 3


def test_the_python_of_the_documents_runs(sandbox: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "WEIGHTS.md").read_text(), flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "WEIGHTS.md", "exec"), names)
    expected = random_model(CONFIGS["tiny"], torch.float32).state_dict()
    found = names["module"].model.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(found[name], values) for name, values in expected.items())
