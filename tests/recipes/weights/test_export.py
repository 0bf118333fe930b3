"""`zellige-export`, from checkpoints that Lightning wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from safetensors.torch import load_file
from torch import Tensor

from zellige_lightning.recipes.wan21.config import CONFIGS
from zellige_lightning.recipes.wan21.export import main
from zellige_lightning.recipes.wan21.layouts import to_diffusers
from zellige_lightning.recipes.wan21.module import WanModule

FILE = "diffusion_pytorch_model.safetensors"


class Drifting(WanModule):
    """Moves every weight by a constant each step: trained weights and their average differ, and are known."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        return sum(p.sum() for p in self.model.parameters())  # type: ignore[return-value]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.25)


class Saves(Callback):
    """Writes a checkpoint after the last step, and keeps the weights as they then were."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)
            torch.save(
                {n: v.clone() for n, v in pl_module.state_dict().items()}, self.path.with_suffix(".pt")
            )


def train(folder: Path, *, ema: bool) -> Path:
    torch.manual_seed(3)
    module = Drifting("tiny")
    trainer = Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # The average lives as long as the fit, so the checkpoint is written in it.
        callbacks=[*([EMAWeightAveraging(decay=0.5)] if ema else []), Saves(folder / "run.ckpt")],
        default_root_dir=folder,
    )
    trainer.fit(module, torch.utils.data.DataLoader(torch.zeros(3, 1)))
    return folder / "run.ckpt"


def exported(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / FILE)


def test_trained_weights_and_their_average(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = train(tmp_path, ema=True)
    trained = torch.load(tmp_path / "run.pt", weights_only=True)
    main([str(checkpoint), str(tmp_path / "raw"), "--dtype", "float32", "--layout", "original"])
    main([str(checkpoint), str(tmp_path / "ema"), "--dtype", "float32", "--layout", "original", "--ema"])
    assert FILE in capsys.readouterr().out
    raw, average = exported(tmp_path / "raw"), exported(tmp_path / "ema")
    for name, values in raw.items():
        assert torch.equal(values, trained[f"model.{name}"])
        # The average of w + 1/2, w + 1/4 and w with weights 1/4, 1/4, 1/2.
        torch.testing.assert_close(average[name], values + 0.1875, rtol=0, atol=1e-6)


def test_diffusers_loads_an_export(tmp_path: Path) -> None:
    checkpoint = train(tmp_path, ema=False)
    main([str(checkpoint), str(tmp_path / "out"), "--dtype", "float32"])
    loaded, report = WanTransformer3DModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    trained = torch.load(tmp_path / "run.pt", weights_only=True)
    state = loaded.state_dict()
    for name, values in trained.items():
        assert torch.equal(state[to_diffusers(name.removeprefix("model."))], values)


def test_half_precision_prefix_and_shards(tmp_path: Path) -> None:
    checkpoint = train(tmp_path, ema=False)
    options = ["--layout", "original", "--prefix", "model.diffusion_model.", "--max-shard-gib", "0.0001"]
    main([str(checkpoint), str(tmp_path / "out"), *options])
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    state = {name: values for file in files for name, values in load_file(file).items()}
    assert len(state) == len(torch.load(tmp_path / "run.pt", weights_only=True))
    assert {values.dtype for values in state.values()} == {torch.bfloat16}
    assert all(name.startswith("model.diffusion_model.") for name in state)


class Planted:
    """Runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


def test_a_checkpoint_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "run.ckpt"
    torch.save({"state_dict": {"model.x": torch.ones(1)}, "planted": Planted(marker)}, path)
    with pytest.raises(SystemExit, match="DataError: .*more than tensors[\\s\\S]*--unsafe-pickle"):
        main([str(path), str(tmp_path / "out")])
    assert not marker.exists()


def save(path: Path, checkpoint: object) -> Path:
    torch.save(checkpoint, path)
    return path


def test_bad_checkpoints_are_named(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    weights = {f"model.{n}": v for n, v in WanModule("tiny").model.state_dict().items()}
    cases = {
        "no file": (tmp_path / "gone.ckpt", []),
        "no Lightning checkpoint": (save(tmp_path / "a.ckpt", {"x": 1}), []),
        "no running average": (save(tmp_path / "b.ckpt", {"state_dict": weights}), ["--ema"]),
        "no weights of a WanModule": (
            save(tmp_path / "c.ckpt", {"state_dict": {"net.x": torch.ones(1)}}),
            [],
        ),
        "are not those of the model": (tmp_path / "b.ckpt", ["--model", "demo"]),
        "max-shard-gib": (tmp_path / "b.ckpt", ["--max-shard-gib", "0"]),
    }
    (tmp_path / "d.ckpt").write_bytes((tmp_path / "b.ckpt").read_bytes()[:5000])
    cases["cannot be read"] = (tmp_path / "d.ckpt", [])
    for says, (path, options) in cases.items():
        with pytest.raises(SystemExit, match=f"Error: .*{says}"):
            main([str(path), out, *options])
    assert not (tmp_path / "out").exists()
    assert CONFIGS["tiny"].num_heads == 4
