"""What several tests share."""

from __future__ import annotations

from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.recipes.data.files import TINY_BUCKETS, captioned, make_tiny_vae, write_image
from tests.recipes.data.stores import Command
from zellige_lightning.recipes.wan21.encode_cli import main


@pytest.fixture(scope="session", autouse=True)
def one_fork_server() -> None:
    """There is one in a process, and it imports what it was told before its first fork: both users' needs."""
    modules = ["zellige_lightning.recipes.wan21.decoder", "zellige_lightning.strategy"]
    forkserver.set_forkserver_preload(modules)
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def tiny_vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vae(tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="session")
def tiny_buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("buckets") / "tiny.yaml"
    path.write_text(TINY_BUCKETS)
    return path


@pytest.fixture
def encode(tmp_path: Path, tiny_vae: Path, tiny_buckets: Path) -> Command:
    """`zellige-encode` of a source into `tmp_path/out`, with the tiny VAE."""

    def run(source: Path, *options: str, out: str = "out") -> None:
        common = ["--buckets", str(tiny_buckets), "--workers", "1", "--vae", str(tiny_vae), "--quiet"]
        main([str(source), "--output", str(tmp_path / out), *common, *options])

    return run


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Nine small captioned images."""
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(9):
        captioned(write_image(folder / f"{i}.png", seed=i), f"picture {i}")
    return folder
