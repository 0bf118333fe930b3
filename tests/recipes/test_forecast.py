"""The dry run: its memory against real steps, its states against arithmetic, and that it needs no memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.plugins.precision import Precision

from zellige_lightning.engine import AttentionRouter
from zellige_lightning.errors import ConfigError
from zellige_lightning.geometry import measure_geometry
from zellige_lightning.recipes.forecast import states_of
from zellige_lightning.recipes.train import train
from zellige_lightning.recipes.wan21.config import CONFIGS
from zellige_lightning.recipes.wan21.encode import Encoded, build_store
from zellige_lightning.recipes.wan21.meta_memory import geometry_of
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.sources import FieldSpec, Sample, SyntheticSource
from zellige_lightning.trace import attention_shape
from zellige_lightning.trial import TrialStep


@pytest.fixture(autouse=True)
def no_hydra_is_left() -> Iterator[None]:
    yield
    HydraConfig.instance().cfg = None


@pytest.mark.parametrize("checkpointing", [False, True])
def test_fake_tensors_take_what_real_ones_take(checkpointing: bool) -> None:
    """The profiler's way, on a real step in bf16, against the counted one, on the same small model."""
    config = replace(CONFIGS["tiny"], num_layers=4)
    fields = {"latents": FieldSpec((64,), torch.bfloat16)}, {"text": FieldSpec((16, 64), torch.bfloat16)}
    module = WanModule(config, activation_checkpointing=checkpointing).to(torch.bfloat16)
    router = AttentionRouter()
    for name, attention in module.attention_modules().items():
        router.attach(name, attention)
    trial = TrialStep(Precision(), SyntheticSource(*fields))
    measured = measure_geometry(module, router, trial, attention_shape(module, router, trial))
    counted = geometry_of(config, "full" if checkpointing else "none", mixed=False)
    assert counted.resident_bytes_per_token == pytest.approx(measured.resident_bytes_per_token, rel=0.15)
    both = [g.resident_bytes_per_token + g.transient_bytes_per_token for g in (counted, measured)]
    assert both[0] == pytest.approx(both[1], rel=0.25)


def test_modes_keep_less_the_more_they_recompute() -> None:
    config = CONFIGS["wan21_1_3b"]
    none, full, everything = (geometry_of(config, mode, mixed=True) for mode in ("none", "full", "full+all"))
    anchors = geometry_of(config, "full+anchors", mixed=True)
    # A block's input in bf16 for each of 30 layers, and little besides.
    inputs = 30 * 1536 * 2
    assert inputs <= full.resident_bytes_per_token < 1.3 * inputs
    kept = 30 * 12 * (128 * 2 + 4)
    assert everything.resident_bytes_per_token == full.resident_bytes_per_token + kept
    assert (anchors.resident_bytes_per_token, anchors.split_bytes_per_token) == (
        full.resident_bytes_per_token, kept,
    )  # fmt: skip
    assert none.resident_bytes_per_token > 20 * full.resident_bytes_per_token


def test_states_are_counted() -> None:
    with torch.device("meta"):
        module = WanModule("wan21_14b")
    whole = states_of(module, 16, sharded=False, mixed=True, average=True)
    assert whole.total == 14_288_491_584 * (4 + 4 + 8 + 4)
    shard = states_of(module, 16, sharded=True, mixed=True, average=False)
    assert shard.total - shard.gathered == 893_030_724 * 16
    assert shard.gathered == 4 * (232_719_424 + 4 * 351_394_304) and not shard.kept
    kept = states_of(module, 16, sharded=True, mixed=False, average=False, keeps=lambda size: size < 30e9)
    assert kept.kept == 2 * 14_288_491_584
    assert states_of(module, 1, sharded=False, mixed=False, average=False).parameters == 2 * 14_288_491_584


def dry_run(*overrides: str) -> dict:
    with initialize_config_module("zellige_lightning.conf", version_base="1.3"):
        config = compose("train", overrides=["dry_run=true", *overrides], return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    return train(config)


def test_14b_is_forecast_for_16_and_32_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that could not hold the model. Few tokens, to plan in no time."""
    figures = dry_run("recipe=wan21_14b", "data.tokens_per_batch=400000", "planner.deterministic_limit=0.2")
    text = capsys.readouterr().out
    assert figures["parameters"] == 14_288_491_584
    assert list(figures["worlds"]) == [
        f"{n} GPUs, {strategy}" for n in (16, 32) for strategy in ("zellige", "zellige_fsdp2")
    ]
    assert text.count("does not fit: the states alone fill the GPU; shard with strategy=zellige_fsdp2") == 2
    for ranks in (16, 32):
        world = figures["worlds"][f"{ranks} GPUs, zellige_fsdp2"]
        peaks = world["modes"]["full"]
        assert len(peaks) == ranks
        assert world["states_gib"] < min(peaks) and max(peaks) <= 79.1
        assert f"rank {ranks - 1:3}: {peaks[-1]:6.1f}" in text


def test_samples_that_are_there_are_what_is_forecast(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [Sample(f"s{i}", (1 + 4 * (i % 2), 8, 8)) for i in range(6)]
    build_store(
        tmp_path / "latents",
        {"codec": "random", "text_len": 16, "text_dim": 64},
        samples,
        lambda s: Encoded(torch.zeros(s.grid[0] * 64, 64).half(), torch.zeros(16, 64).half(), ""),
    )
    overrides = (
        "recipe=wan21_1_3b",
        f"data.datamodule.folder={tmp_path / 'latents'}",
        "catalog.buckets=null",
    )
    budget = "data.tokens_per_rank=200", "data.video_token_share=null"
    figures = dry_run(
        *overrides, *budget, "forecast.ranks=[2,8]", "forecast.cluster=a800", "model.model=demo"
    )
    text = capsys.readouterr().out
    assert "the first batch of" in text and "does not fit" not in text
    tokens = [int(n.replace(",", "")) for n in re.findall(r"sequences, ([\d,]+) tokens", text)]
    assert tokens[0] <= 400 and tokens[1] == 3 * 64 + 3 * 320, "the budget is that of all GPUs"
    assert "Global batch on 8 GPUs: 6 sequences, 1,152 tokens" in text
    assert len(figures["worlds"]["2 GPUs, zellige"]["modes"]["full"]) == 2


def test_what_cannot_be_forecast_is_said() -> None:
    with pytest.raises(ConfigError, match="there is no cluster 'b300'"):
        dry_run("recipe=wan21_1_3b", "forecast.cluster=b300")
    with pytest.raises(ConfigError, match="2000 ranks"):
        dry_run("recipe=wan21_1_3b", "forecast.ranks=[2000]")
