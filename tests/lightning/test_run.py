"""A whole run: fit, validate, test and predict, twice in one process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from tests.distributed import run_distributed
from tests.lightning.toy import (
    Net,
    Source,
    Toy,
    callback_of,
    digest,
    make_data,
    make_toy,
    make_trainer,
    model_prices,
    reference_loss,
)
from zellige_lightning.monitor import MakespanMonitor

HELD_OUT = Source("val", 5, 2)


class Collectives(Callback):
    """What callbacks and metrics use of any strategy, called while planning runs in the background."""

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        strategy, rank = trainer.strategy, trainer.global_rank
        mine = torch.tensor([1.0 + rank])
        self.results = {
            "broadcast": strategy.broadcast({"rank": rank}, src=1),
            "mean": float(strategy.reduce(mine.clone(), reduce_op="mean")),
            "sum": float(strategy.reduce(mine.clone(), reduce_op="sum")),
            "gather": strategy.all_gather(mine).flatten().tolist(),
            "any": strategy.reduce_boolean_decision(rank == 1, all=False),
        }
        strategy.barrier("a user's")


class ModelBetweenSteps(Callback):
    """Looks at the model's output for one sample between steps, as a sampling callback does."""

    def __init__(self) -> None:
        self.differences: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Toy, *args: Any) -> None:
        plain = Net()
        plain.load_state_dict(pl_module.net.state_dict())
        x, positions = torch.ones(7, 4), torch.zeros(7, 3)
        with torch.no_grad():
            self.differences.append(float((pl_module.net(x, positions) - plain(x, positions)).abs().max()))


def everything(rank: int, folder: str) -> list[dict[str, Any]]:
    model_prices()
    return [one_run(rank, Path(folder) / str(attempt)) for attempt in range(2)]


def one_run(rank: int, folder: Path) -> dict[str, Any]:
    logger = CSVLogger(folder / f"log{rank}", name="", version="")
    best = ModelCheckpoint(folder / "checkpoints", monitor="val", filename="best", save_last=True)
    by_loss = ModelCheckpoint(folder / "by_loss", monitor="loss", mode="min", every_n_train_steps=1)
    collectives, between = Collectives(), ModelBetweenSteps()
    trainer = make_trainer(
        logger=logger,
        callbacks=[best, by_loss, collectives, between],
        enable_checkpointing=True,
        max_epochs=2,
        limit_val_batches=1.0,
        num_sanity_val_steps=1,
    )
    toy, data = make_toy(), make_data()
    trainer.fit(toy, data)
    result = {
        "digest": digest(toy),
        "seen": toy.seen,
        "fitted_val": float(trainer.callback_metrics["val"]),
        "best": best.best_model_path,
        "best_loss": by_loss.best_model_score,
        "lost_connections": len(dist.distributed_c10d._world.pg_map),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("zellige")],
        "collectives": collectives.results,
        "between": max(between.differences),
        "splits": sum(r.num_splits for r in callback_of(trainer, MakespanMonitor).records),
        "log": (folder / f"log{rank}" / "metrics.csv").exists(),
    }
    with torch.no_grad():
        losses = {k: float(reference_loss(toy.net, k, g)) for k, g in HELD_OUT.grids.items()}
    result["expected"] = losses
    (result["validate"],) = trainer.validate(toy, data, verbose=False)
    (result["test"],) = trainer.test(toy, data, verbose=False)
    result["predictions"] = [row for batch in trainer.predict(toy, data) for row in batch.items()]
    result["groups"] = len(dist.distributed_c10d._world.pg_map)
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_distributed(everything, 2, str(folder), group=False)


def test_every_sample_is_seen_once_in_each_epoch(runs: Any) -> None:
    for attempts in runs[1]:
        for result in attempts:
            for epoch in range(2):
                keys = [key for e, batch in result["seen"] if e == epoch for key in batch]
                assert sorted(keys) == sorted(Source("train").grids)


def test_a_second_run_in_the_process_repeats_the_first(runs: Any) -> None:
    digests = {result["digest"] for attempts in runs[1] for result in attempts}
    assert len(digests) == 1
    for first, second in runs[1]:
        assert first["splits"] > 0
        assert first["groups"] == second["groups"], "process groups of the first run are left"
        assert first["threads"] == second["threads"] == []


def test_evaluation_is_the_mean_over_all_sequences(runs: Any) -> None:
    for attempts in runs[1]:
        for result in attempts:
            mean = sum(result["expected"].values()) / len(result["expected"])
            assert result["fitted_val"] == pytest.approx(mean, abs=1e-6)
            assert result["validate"] == {"val": pytest.approx(mean, abs=1e-6)}
            assert result["test"] == {"test": pytest.approx(mean, abs=1e-6)}


def test_predictions_of_the_ranks_complete_each_other(runs: Any) -> None:
    rows = [row for attempts in runs[1] for row in attempts[0]["predictions"]]
    assert sorted(key for key, _ in rows) == sorted(HELD_OUT.grids)
    assert dict(rows) == pytest.approx(runs[1][0][0]["expected"], abs=1e-6)


def test_only_rank_zero_logs(runs: Any) -> None:
    folder, ((first, _), (second, _)) = runs
    assert first["log"] and not second["log"]
    header, *rows = (folder / "0" / "log0" / "metrics.csv").read_text().splitlines()
    names = header.split(",")
    assert {"loss", "val", "zellige/makespan_pred_s", "zellige/makespan_s", "zellige/exposed_ms"} <= set(
        names
    )
    assert len([row for row in rows if row.split(",")[names.index("loss")]]) == len(first["seen"])


def test_checkpoints_are_those_of_the_plain_model(runs: Any) -> None:
    folder, (attempts, _) = runs
    for name in ("best.ckpt", "last.ckpt"):
        state = torch.load(folder / "0" / "checkpoints" / name, weights_only=False)
        assert set(state["state_dict"]) == set(Toy().state_dict())
        # what batches and plans follow from; plans and the profile itself are derived data
        assert set(state["zellige"]) == {"position", "tokens_per_batch", "prices"}
    assert Path(attempts[0]["best"]).name == "best.ckpt" and attempts[0]["best_loss"] is not None
    assert len(list((folder / "0" / "by_loss").iterdir())) == 1


def test_the_strategys_own_collectives_are_untouched(runs: Any) -> None:
    for attempts in runs[1]:
        assert attempts[0]["collectives"] == {
            "broadcast": {"rank": 1}, "mean": 1.5, "sum": 3.0, "gather": [1.0, 2.0], "any": True,
        }  # fmt: skip


def test_between_steps_the_model_is_the_users(runs: Any) -> None:
    assert all(result["between"] == 0.0 for attempts in runs[1] for result in attempts)
