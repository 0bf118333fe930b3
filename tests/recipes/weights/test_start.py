"""Training that starts from published weights: both layouts, every rank alike, and errors on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder

from tests.distributed import run_distributed, run_outcomes
from tests.lightning.toy import make_trainer, model_prices, whole_tensor
from tests.recipes.packing import random_model
from tests.recipes.test_module import SOURCE
from zellige_lightning.datamodule import ZelligeDataModule
from zellige_lightning.errors import DataError
from zellige_lightning.recipes.wan21.config import CONFIGS
from zellige_lightning.recipes.wan21.layouts import LAYOUTS, ORIGINAL
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.recipes.wan21.start import find_weights, start_from
from zellige_lightning.recipes.wan21.weights import save_weights
from zellige_lightning.sources import Sample, SyntheticSource


def saved(folder: Path, layout: str = ORIGINAL, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Weights on disk in several files, and what they are."""
    random = random_model(CONFIGS["tiny"], torch.float32).state_dict()
    state = {name: scale * values for name, values in random.items()}
    save_weights(folder, CONFIGS["tiny"], state, layout=layout, max_shard_bytes=200_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return state


class Data(LightningDataModule):
    """Random samples with the fields of the recipe."""

    def train_dataloader(self) -> SyntheticSource:
        samples = [Sample(f"s{i}", (1 + i % 2, 2, 3)) for i in range(8)]
        return SyntheticSource(SOURCE.token_fields, SOURCE.sequence_fields, samples)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_holds_the_weights_before_it_trains(layout: str, tmp_path: Path) -> None:
    state = saved(tmp_path / "weights", layout)
    module = WanModule("tiny", weights=str(tmp_path / "weights"))
    assert all(p.is_meta for p in module.parameters())
    module.configure_model()
    assert not any(p.is_meta for p in module.parameters())
    start_from(module.model, str(tmp_path / "weights"), torch.device("cpu"), 0)
    assert all(torch.equal(p, state[name]) for name, p in module.model.named_parameters())


def fit(
    rank: int, weights: str, save_to: str | None = None, resume: str | None = None, strategy: str = "zellige"
) -> dict[str, Any]:
    """One step that changes next to nothing. `{rank}` in `weights` is the rank."""
    model_prices()
    seed_everything(0, workers=True, verbose=False)
    module = WanModule("tiny", weights=weights.format(rank=rank), lr=1e-9, warmup_steps=0)
    trainer = make_trainer(strategy, max_steps=1 if resume is None else 2, max_epochs=-1)
    trainer.fit(module, ZelligeDataModule(Data(), tokens_per_batch=20), ckpt_path=resume)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {name: whole_tensor(p).numpy() for name, p in module.model.named_parameters()}


@pytest.mark.parametrize("strategy", ["zellige", "zellige_fsdp2"])
def test_two_ranks_train_from_them_and_a_checkpoint_needs_them_no_more(strategy: str, tmp_path: Path) -> None:
    state = saved(tmp_path / "weights")
    checkpoint, path = str(tmp_path / "run.ckpt"), str(tmp_path / "weights")
    first, second = run_distributed(fit, 2, path, checkpoint, None, strategy, group=False)
    (tmp_path / "weights").rename(tmp_path / "gone")
    (resumed,) = run_distributed(fit, 1, path, None, checkpoint, strategy, group=False)
    for name, values in state.items():
        assert (first[name] == second[name]).all()
        for found in (first, resumed):
            torch.testing.assert_close(torch.from_numpy(found[name]), values, rtol=0, atol=1e-6)


def finding(rank: int, weights: str) -> dict[str, Any]:
    """One step at a rate of next to nothing, after a search for rates that goes back to where it began."""
    model_prices()
    seed_everything(0, workers=True, verbose=False)
    module = WanModule("tiny", weights=weights, lr=1e-9, warmup_steps=0)
    search = LearningRateFinder(1e-9, 1e-8, num_training_steps=3, update_attr=False)
    trainer = make_trainer(max_steps=1, max_epochs=-1, callbacks=[search], default_root_dir=weights)
    trainer.fit(module, ZelligeDataModule(Data(), tokens_per_batch=20))
    return {name: p.detach().numpy() for name, p in module.model.named_parameters()}


def test_training_starts_from_them_after_a_search_for_a_rate(tmp_path: Path) -> None:
    state = saved(tmp_path / "weights")
    (found,) = run_distributed(finding, 1, str(tmp_path / "weights"), group=False)
    for name, values in state.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), values, rtol=0, atol=1e-6)


def test_weights_that_one_rank_cannot_read_stop_all(tmp_path: Path) -> None:
    saved(tmp_path / "weights")
    (tmp_path / "weights").rename(tmp_path / "weights0")
    outcomes = run_outcomes(fit, 2, str(tmp_path / "weights{rank}"), group=False)
    for outcome in outcomes:
        assert outcome.error is not None
        kind, text = outcome.error
        assert kind == "DataError"
        assert "rank 1" in text and "weights1" in text


def test_names_that_lead_nowhere_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no weights at 'some/where/else'"):
        find_weights("some/where/else")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="neither a local folder nor to be had from the hub"):
        find_weights("Wan-AI/Wan2.1-of-tomorrow", download=False)
    (tmp_path / "here").mkdir()
    assert find_weights(os.fspath(tmp_path / "here")) == tmp_path / "here"


def test_only_the_transformer_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from fnmatch import fnmatch

    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert find_weights("Wan-AI/Wan2.1-T2V-1.3B-Diffusers") == tmp_path
    files = [
        *("config.json", "diffusion_pytorch_model.safetensors", "transformer/config.json"),
        *("transformer/diffusion_pytorch_model-00001-of-00002.safetensors", "vae/config.json"),
        *("models_t5_umt5-xxl-enc-bf16.pth", "text_encoder/model-00001-of-00005.safetensors"),
    ]
    fetched = [f for f in files if any(fnmatch(f, pattern) for pattern in asked["allow_patterns"])]
    assert fetched == files[:4]
    assert not asked["local_files_only"]
