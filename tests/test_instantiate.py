"""Only allowed targets are called, and only with arguments that they have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from zellige_lightning.errors import ConfigError
from zellige_lightning.instantiate import instantiate, instantiate_all

CALLBACKS = "lightning.pytorch.callbacks"
FOREIGN = [
    "os.system",
    "subprocess.Popen",
    "builtins.eval",
    "torch.load",
    "torch.optimizers.AdamW",
    "lightning.fabric.Fabric",
    "zellige_lightning_evil.Thing",
    "zellige_lightning..cli",
    "torch.optim.__builtins__",
    "lightning.pytorch.trainer.trainer.os.system",
    "torch.optim.optimizer.functools.partial",
    "zellige_lightning.cli.sys.exit",
    "lightning.pytorch.callbacks",
    "",
    7,
]


@pytest.mark.parametrize("target", FOREIGN)
def test_foreign_targets_are_refused(target: object) -> None:
    node = OmegaConf.create({"_target_": target})
    with pytest.raises(ConfigError, match="allowed"):
        instantiate(node, "model")


def test_a_nested_foreign_target_is_refused_before_anything_is_imported(tmp_path: Path) -> None:
    node = OmegaConf.create(
        {"_target_": "torch.optim.AdamW", "params": [{"inner": {"_target_": "antigravity.geohash"}}]}
    )
    with pytest.raises(ConfigError, match=r"optimizer\.params\[0\]\.inner\._target_='antigravity.geohash'"):
        instantiate(node, "optimizer")
    assert "antigravity" not in sys.modules


def test_a_target_behind_an_interpolation_is_refused() -> None:
    root = OmegaConf.create({"name": "os.getcwd", "model": {"_target_": "${name}"}})
    with pytest.raises(ConfigError, match="os.getcwd"):
        instantiate(root.model, "model")


def test_unknown_arguments_name_the_legal_ones() -> None:
    node = OmegaConf.create({"_target_": f"{CALLBACKS}.LearningRateMonitor", "log_interval": "step"})
    with pytest.raises(
        ConfigError, match=r"callbacks\.lr has no setting \['log_interval'\][\s\S]*logging_interval"
    ):
        instantiate(node, "callbacks.lr")


def test_a_missing_value_is_named() -> None:
    root = OmegaConf.create({"data": {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "???"}})
    with pytest.raises(ConfigError, match="data.save_dir has no value"):
        instantiate(root.data, "data")


def test_a_target_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="NoSuchCallback"):
        instantiate(
            OmegaConf.create({"_target_": "lightning.pytorch.callbacks.NoSuchCallback"}), "callbacks.x"
        )


def test_our_own_errors_come_through() -> None:
    node = OmegaConf.create({"_target_": "zellige_lightning.PlannerConfig", "epsilon": "abc"})
    with pytest.raises(ConfigError, match="planner.epsilon"):
        instantiate(node, "planner")


def test_a_group_is_instantiated_in_order_without_the_nodes_set_to_null() -> None:
    group = OmegaConf.create(
        {
            "first": {"_target_": f"{CALLBACKS}.LearningRateMonitor"},
            "off": None,
            "second": {"_target_": f"{CALLBACKS}.TQDMProgressBar", "refresh_rate": 3},
        }
    )
    objects = instantiate_all(group, "callbacks")
    assert [type(o).__name__ for o in objects] == ["LearningRateMonitor", "TQDMProgressBar"]
    assert objects[1].refresh_rate == 3
    assert instantiate_all(None, "logger") == []


def test_an_argument_that_is_needed_is_named() -> None:
    with pytest.raises(ConfigError, match="logger.csv: missing a required argument: 'save_dir'"):
        instantiate(OmegaConf.create({"_target_": "lightning.pytorch.loggers.CSVLogger"}), "logger.csv")


def test_nested_nodes_and_ready_made_arguments() -> None:
    placement = "zellige_lightning.placement"
    config = {"_target_": f"{placement}.ParallelConfig", "h": 2}
    node = OmegaConf.create({"_target_": f"{placement}.PlacementOption", "config": config})
    option = instantiate(node, "option", ranks=(0, 1))
    assert option.config.h == option.config.degree == 2
    assert option.ranks == (0, 1)


def test_a_partial_waits_for_the_rest() -> None:
    node = OmegaConf.create({"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.25})
    optimizer = instantiate(node, "optimizer")([torch.nn.Parameter(torch.zeros(1))])
    assert optimizer.defaults["lr"] == 0.25
