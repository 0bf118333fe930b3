"""Every configuration composes, agrees with Python's defaults, and names only what exists."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

import zellige_lightning.conf
from zellige_lightning.cli import explain
from zellige_lightning.datamodule import ZelligeDataModule, as_catalog
from zellige_lightning.engine_config import EngineConfig
from zellige_lightning.errors import ConfigError
from zellige_lightning.fsdp2 import ShardedStrategy, ZelligeFSDP2Strategy
from zellige_lightning.instantiate import check_targets, instantiate, resolved
from zellige_lightning.placing import PlacingStrategy
from zellige_lightning.planner.planner import PLANNERS, PlannerConfig
from zellige_lightning.profiler import ProfilerConfig
from zellige_lightning.recipes.train import train
from zellige_lightning.recipes.wan21.demo_data import DemoDataModule
from zellige_lightning.recipes.wan21.demo_media import demo_buckets
from zellige_lightning.recipes.wan21.flow import FlowMatching
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.sources.adaptive_load import AdaptiveLoad
from zellige_lightning.strategy import ZelligeStrategy

CONF = Path(zellige_lightning.conf.__file__).parent
# conf/cluster is no group of a job: only zellige-plan and the simulator read it.
OPTIONS = sorted(
    path.relative_to(CONF).with_suffix("").as_posix()
    for path in CONF.glob("*/*.yaml")
    if path.parent.name != "cluster"
)
RECIPES = sorted(path.stem for path in (CONF / "recipe").glob("*.yaml"))


@pytest.fixture(autouse=True)
def hydra_context() -> Iterator[None]:
    with initialize_config_module("zellige_lightning.conf", version_base="1.3"):
        yield
    HydraConfig.instance().cfg = None


def composed(*overrides: str) -> DictConfig:
    """A job's configuration, with an output folder as a job would have."""
    config = compose("train", overrides=list(overrides), return_hydra_config=True)
    config.hydra.runtime.output_dir = "outputs/here"
    HydraConfig.instance().set_config(config)
    return config


def plain(node: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(node, resolve=False)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def python_defaults(target: Any) -> dict[str, Any]:
    parameters = inspect.signature(target).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def field_defaults(cls: Any) -> dict[str, Any]:
    return {f.name: f.default if f.default is not MISSING else f.default_factory() for f in fields(cls)}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option: str) -> None:
    group, name = option.split("/")
    recipe = ["recipe=wan21_1_3b"] if group == "stage" else []  # a stage is one of a recipe
    node = "model" if group in ("recipe", "stage") else group
    assert composed(*recipe, f"{group}={name}")[node] is not None


STAGES = sorted(path.stem for path in (CONF / "stage").glob("*.yaml"))
TRAININGS = [(recipe,) for recipe in RECIPES] + [
    (recipe, f"stage={stage}") for recipe in RECIPES if recipe != "demo" for stage in STAGES
]


@pytest.mark.parametrize("training", TRAININGS, ids=" ".join)
def test_every_target_of_a_recipe_exists_and_has_its_settings(training: tuple[str, ...]) -> None:
    recipe, *stage = training
    config = composed(
        f"recipe={recipe}", *stage, "data.datamodule.folder=x" if recipe != "demo" else "seed=1"
    )
    groups = {
        name: config[name] for name in config if isinstance(config[name], DictConfig) and name != "hydra"
    }
    for name, node in groups.items():
        check_targets(resolved(node, name), name)
    assert len(groups) >= 10


def test_a_logger_whose_package_is_missing_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: object, **settings: Any) -> None:
        assert settings["project"] == "zellige"
        raise ModuleNotFoundError("No module named 'wandb'")

    monkeypatch.setattr("lightning.pytorch.loggers.WandbLogger.__init__", missing)
    node = composed("recipe=demo", "logger=wandb").logger.wandb
    with pytest.raises(ConfigError, match=r"logger.wandb needs a package .* 'wandb'"):
        instantiate(node, "logger.wandb")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_shapes_rate_and_length_of_its_own(stage: str) -> None:
    plain_recipe, staged = composed("recipe=wan21_14b"), composed("recipe=wan21_14b", f"stage={stage}")
    assert staged.catalog.buckets != plain_recipe.catalog.buckets
    assert staged.model.decay_steps == staged.trainer.max_steps != plain_recipe.trainer.max_steps
    assert staged.model.model == "wan21_14b"
    resolution = stage.replace("256px", "256p")
    assert all(resolution in name for name in list(staged.catalog.buckets)[-3:])


def test_objectives_reach_the_model() -> None:
    for objective, times in (("default", "logit_normal"), ("diffsynth", "steps")):
        node = composed("recipe=demo", f"objective={objective}", "+objective.bucket_shifts.image=1.5").model
        flow = instantiate(node, "model").flow
        assert (flow.times, flow.bucket_shifts) == (times, {"image": 1.5})


def test_the_demo_instantiates() -> None:
    config = composed("recipe=demo")
    assert isinstance(instantiate(config.strategy, "strategy"), ZelligeStrategy)
    assert isinstance(instantiate(config.data, "data"), ZelligeDataModule)
    assert isinstance(instantiate(config.model, "model"), WanModule)
    for group in ("callbacks", "logger"):
        for name, node in config[group].items():
            instantiate(node, f"{group}.{name}")
    catalog = as_catalog(plain(config.catalog))
    assert catalog is not None
    assert set(catalog.buckets) == set(demo_buckets())


def test_the_14b_recipe_is_sharded_and_takes_no_memory() -> None:
    config = composed("recipe=wan21_14b", "data.datamodule.folder=x")
    strategy = instantiate(config.strategy, "strategy")
    assert isinstance(strategy, ZelligeFSDP2Strategy)
    assert config.strategy.keep_gradients is python_defaults(ShardedStrategy)["keep_gradients"]
    module = instantiate(config.model, "model")
    assert isinstance(module, WanModule) and all(p.is_meta for p in module.parameters())
    assert sum(p.numel() for p in module.parameters()) == 14_288_491_584


@pytest.mark.parametrize(
    ("group", "cls"), [("planner", PlannerConfig), ("profiler", ProfilerConfig), ("engine", EngineConfig)]
)
def test_groups_equal_the_defaults_in_python(group: str, cls: Any) -> None:
    assert plain(composed()[group]) == field_defaults(cls)


def test_every_planner_option_names_its_planner() -> None:
    options = [option.split("/")[1] for option in OPTIONS if option.startswith("planner/")]
    assert {"paper", "joint", "exact"} <= set(options) <= set(PLANNERS)
    for option in options:
        assert PlannerConfig.of(plain(composed(f"planner={option}").planner)).name == option


@pytest.mark.parametrize(
    ("written", "meant"), [("on", True), ("off", False), ("true", True), ("false", False)]
)
def test_online_is_on_or_off(written: str, meant: bool) -> None:
    config = PlannerConfig.of(plain(composed(f"planner.online={written}").planner))
    assert config.online is config.adapts is meant
    assert not PlannerConfig.of(plain(composed("planner=knapformer").planner)).adapts
    with pytest.raises(ConfigError, match=r"planner.online = 'maybe'"):
        PlannerConfig(online="maybe")  # type: ignore[arg-type]


def test_nodes_equal_the_defaults_in_python() -> None:
    config = composed("recipe=demo", "model=wan21_1_3b")
    strategy = plain(config.strategy)
    assert {name: strategy[name] for name in ("lookahead", "self_check")}.items() <= python_defaults(
        PlacingStrategy
    ).items()
    model = {name: value for name, value in plain(config.model).items() if name not in ("_target_", "flow")}
    model["betas"] = tuple(model["betas"])
    expected = python_defaults(WanModule)
    del expected["flow"]
    assert model == expected
    flow = {name: value for name, value in plain(config.objective).items() if name != "_target_"}
    assert flow == field_defaults(FlowMatching) | {"seed": "${seed}"}
    for name in ("loss_reduction", "adaptive_load"):
        assert config.data[name] == python_defaults(ZelligeDataModule)[name]
    inner = plain(config.data.datamodule)
    del inner["_target_"]
    assert inner == python_defaults(DemoDataModule) | {"seed": "${seed}"}


def test_settings_reach_the_strategy() -> None:
    overrides = ("planner=joint", "planner.epsilon=0.25", "planner.memory_cap_gib=3", "profiler.repeats=7")
    strategy = instantiate(composed("recipe=demo", *overrides).strategy, "strategy")
    assert strategy.planner_config == PlannerConfig(name="joint", epsilon=0.25, memory_cap_gib=3)
    assert strategy.profiler_config.repeats == 7


def test_settings_reach_the_data() -> None:
    overrides = (
        "data.tokens_per_batch=99",
        "data.video_token_share=0.25",
        "catalog.strict=false",
        "+catalog.buckets.extra=[1,3,3]",
    )
    node = composed("recipe=demo", *overrides).data
    data = instantiate(node, "data")
    assert data._tokens_per_batch == 99
    assert data._video_token_share == 0.25
    assert not data._catalog.strict
    assert data._catalog.bucket_for((1, 3, 3)).name == "extra"


def test_adaptive_load_makes_the_batches() -> None:
    settings = "data.adaptive_load={exponent: 1.6, ranks: 2}"
    data = instantiate(composed("recipe=demo", settings, "data.video_token_share=null").data, "data")
    assert data._adaptive_load == AdaptiveLoad(1.6, 2)
    with pytest.raises(ConfigError, match="video_token_share cannot hold"):
        instantiate(composed("recipe=demo", settings).data, "data")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("planner.epsilom=1", "did you mean 'epsilon'.*legal keys of planner: .*memory_cap_gib"),
        ("plannr.epsilon=1", "did you mean 'planner'.*profiler"),
        ("data.datamodule.cache=x", "legal keys of data.datamodule: .*cache_dir"),
        ("planner.epsilon.x=1", "planner.epsilon takes a value"),
    ],
)
def test_typos_are_explained(override: str, says: str) -> None:
    with pytest.raises(ConfigCompositionException) as caught:
        composed("recipe=demo", override)
    error = explain(caught.value)
    assert isinstance(error, ConfigError)
    assert error.fix is not None
    assert re.search(says, error.fix), error.fix


def test_an_option_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(Exception, match="planner/papr") as caught:
        composed("planner=papr")
    assert "joint" in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("planner.epsilon=abc",), "planner.epsilon = 'abc'"),
        (("+planner.epsilom=1",), "epsilom"),
        (("planner.memory_cap_gib=-1",), "memory_cap_gib"),
        (("profiler.repeats=0",), "profiler.repeats"),
        (("strategy.lookahead=0",), "lookahead"),
    ],
)
def test_values_that_make_no_sense_are_typed_errors(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        instantiate(composed("recipe=demo", *overrides).strategy, "strategy")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((), "no model was chosen"),
        (("model=wan21_demo",), "no data was chosen"),
        (("recipe=wan21_1_3b", "trainer.accelerator=cpu"), "data.datamodule.folder has no value"),
    ],
)
def test_a_run_that_cannot_start_says_what_is_missing(overrides: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        train(composed(*overrides))
