"""Options of the Trainer and callbacks that users expect to work as under any strategy."""

from __future__ import annotations

import threading
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, LearningRateFinder, ModelCheckpoint
from torch import Tensor

from tests.distributed import run_distributed
from tests.lightning.toy import (
    Source,
    Toy,
    ToyData,
    callback_of,
    digest,
    flat,
    largest_difference,
    make_data,
    make_toy,
    make_trainer,
    model_prices,
    tokens_of,
)
from zellige_lightning import ZelligeStrategy
from zellige_lightning.batch import RankBatch
from zellige_lightning.monitor import MakespanMonitor


def fitted(settings: dict[str, Any], data: LightningDataModule | None = None) -> tuple[Trainer, Toy]:
    trainer, toy = make_trainer(**settings), make_toy()
    trainer.fit(toy, make_data(data))
    return trainer, toy


# ---- one process, several fits
# --------------------------------------------------------------------------------


def options(rank: int) -> dict[str, Any]:
    model_prices()
    found: dict[str, Any] = {}
    trainer, toy = fitted({"fast_dev_run": 2})
    found["fast_dev_run"] = len(toy.seen), trainer.global_step
    _, toy = fitted({"overfit_batches": 2, "max_epochs": 2})
    found["overfit"] = toy.seen
    trainer, toy = fitted({"limit_train_batches": 0.5, "limit_val_batches": 1, "max_epochs": 2})
    found["limits"] = toy.seen
    found["limited_val"] = float(trainer.callback_metrics["val"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, toy = fitted({"barebones": True, "limit_train_batches": 2})
    ours = [str(w.message) for w in caught if "log_dict" in str(w.message) or "zellige" in str(w.message)]
    found["barebones"] = len(toy.seen), len(callback_of(trainer, MakespanMonitor).records), ours
    trainer, toy = fitted({"enable_progress_bar": True, "limit_train_batches": 2})
    found["bar"] = sorted(trainer.progress_bar_callback.get_metrics(trainer, toy))
    data = ToyData()
    _, toy = fitted({"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}, data)
    found["reloaded"] = data.train_calls, toy.seen
    _, toy = fitted({"max_epochs": 3})
    found["not_reloaded"] = toy.seen
    _, toy = fitted({"max_epochs": 2, "val_check_interval": 2, "limit_val_batches": 1.0})
    found["val_in_mid_epoch"] = toy.seen
    trainer, toy = fitted({})
    trainer.fit_loop.max_epochs = 2
    trainer.fit(toy, make_data())
    found["continued"] = toy.seen
    found["threads"] = [t.name for t in threading.enumerate() if t.name.startswith("zellige")]
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    results = run_distributed(options, 2, group=False)
    assert results[0] == results[1], "the ranks have seen different things"
    return results


def keys_of(seen: list[Any], epoch: int) -> list[str]:
    return sorted(key for e, batch in seen if e == epoch for key in batch)


def test_fast_dev_run(found: Any) -> None:
    assert found[0]["fast_dev_run"] == (2, 2)


def test_overfit_batches_repeats_the_same_batches(found: Any) -> None:
    seen = [batch for _, batch in found[0]["overfit"]]
    assert len(seen) == 4 and seen[:2] == seen[2:] and seen[0] != seen[1]


def test_limits_cut_epochs_short(found: Any) -> None:
    whole, cut = found[0]["not_reloaded"], found[0]["limits"]
    per_epoch = len(whole) // 3
    assert len(cut) == 2 * (per_epoch // 2)
    assert cut[: per_epoch // 2] == whole[: per_epoch // 2]
    assert found[0]["limited_val"] > 0


def test_barebones_logs_nothing_and_records_everything(found: Any) -> None:
    assert found[0]["barebones"] == (2, 2, [])


def test_the_progress_bar_shows_the_loss_and_three_figures(found: Any) -> None:
    assert {"loss", "mk", "imb", "plan_ms"} <= set(found[0]["bar"])


def test_reloading_asks_the_users_module_again(found: Any) -> None:
    calls, seen = found[0]["reloaded"]
    assert calls == 3
    assert seen == found[0]["not_reloaded"]


def test_validation_in_mid_epoch_disturbs_nothing(found: Any) -> None:
    seen = found[0]["val_in_mid_epoch"]
    assert seen == found[0]["not_reloaded"][: len(seen)]
    assert [keys_of(seen, epoch) for epoch in range(2)] == [sorted(Source("train").grids)] * 2
    assert found[0]["threads"] == []


# ---- callbacks
# ------------------------------------------------------------------------------------------------


def tuned(rank: int, folder: str) -> dict[str, Any]:
    model_prices()
    finder = LearningRateFinder(num_training_steps=16, update_attr=True)
    trainer, toy = make_trainer(callbacks=[finder], default_root_dir=folder, max_epochs=4), make_toy()
    trainer.fit(toy, make_data())
    return {"lr": toy.lr, "seen": toy.seen, "tuned": len(toy.seen) - trainer.global_step}


def test_the_learning_rate_finder_trains_and_gives_the_data_back(tmp_path: Path) -> None:
    first, second = run_distributed(tuned, 2, str(tmp_path), group=False)
    assert first == second
    assert first["lr"] != 0.1
    trained = first["seen"][first["tuned"] :]
    for epoch in range(4):
        assert keys_of(trained, epoch) == sorted(Source("train").grids)


def averaged(rank: int, folder: str) -> dict[str, Any]:
    model_prices()
    kept = ModelCheckpoint(folder, filename="ema")
    ema = EMAWeightAveraging(decay=0.5)
    trainer = make_trainer(
        callbacks=[ema, kept], enable_checkpointing=True, limit_val_batches=1.0, max_epochs=2
    )
    toy = make_toy()
    trainer.fit(toy, make_data())
    checkpoint = torch.load(Path(folder) / "ema.ckpt", weights_only=False)
    again, later = make_trainer(callbacks=[EMAWeightAveraging(decay=0.5)], max_epochs=3), make_toy()
    again.fit(later, make_data(), ckpt_path=str(Path(folder) / "ema.ckpt"))
    average = ema._average_model.module
    x, positions = torch.ones(5, 4), torch.zeros(5, 3)
    return {
        "parameters": flat(toy),
        "state": sorted(checkpoint["state_dict"]) == sorted(Toy().state_dict()),
        "distinct": bool((average.net.head.weight != toy.net.head.weight).any()),
        "usable": bool(average.net(x, positions).isfinite().all()),
        "resumed": len(later.seen),
        "per_epoch": len(toy.seen) // 2,
    }


def test_averaged_weights_follow_and_resume(tmp_path: Path) -> None:
    first, second = run_distributed(averaged, 2, str(tmp_path), group=False)
    assert first["parameters"] == second["parameters"]
    for result in (first, second):
        assert result["state"] and result["usable"]
        assert result["resumed"] == result["per_epoch"]


class HookedData(ToyData):
    def on_after_batch_transfer(self, batch: RankBatch, dataloader_idx: int) -> RankBatch:
        batch.tokens["x"] = batch.tokens["x"] * 2
        return batch


class HookedToy(Toy):
    """Moves what it needs into a dict, in its own hook."""

    hooks = 0

    def on_before_batch_transfer(self, batch: RankBatch, dataloader_idx: int) -> RankBatch:
        type(self).hooks += 1
        return batch

    def on_after_batch_transfer(self, batch: RankBatch, dataloader_idx: int) -> Any:
        return {"planned": batch}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["planned"] if isinstance(batch, dict) else batch, batch_idx)


def hooked(rank: int) -> dict[str, Any]:
    model_prices()
    plain = fitted({"limit_train_batches": 3})[1]
    toy, trainer = make_toy(HookedToy), make_trainer(limit_train_batches=3)
    trainer.fit(toy, make_data())
    doubled = fitted({"limit_train_batches": 3}, HookedData())[1]
    return {
        "same": digest(toy) == digest(plain),
        "splits": sum(r.num_splits for r in callback_of(trainer, MakespanMonitor).records),
        "hooks": HookedToy.hooks,
        "data_hook": largest_difference(flat(doubled), flat(plain)),
    }


def test_hooks_of_the_model_and_of_the_data_are_called() -> None:
    for result in run_distributed(hooked, 2, group=False):
        assert result["same"] and result["splits"] > 0 and result["hooks"] == 3
        assert result["data_hook"] > 1e-4


# ---- evaluation alone
# -----------------------------------------------------------------------------------------


class TwoSets(ToyData):
    def val_dataloader(self) -> list[Source]:  # type: ignore[override]
        return [Source("val", 1, 0), Source("other", 3, 1)]


class TwoSetToy(Toy):
    def validation_step(self, batch: RankBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", batch.reduce(self.per_token(batch)), on_step=True, on_epoch=True)


def evaluated(rank: int) -> list[dict[str, float]]:
    toy = make_toy(TwoSetToy)
    return make_trainer(limit_val_batches=1.0).validate(toy, make_data(TwoSets()), verbose=False)


def test_evaluation_alone_with_fewer_samples_than_ranks() -> None:
    """A rank without a sample takes part in synchronized metrics all the same."""
    net = make_toy().net
    expected = []
    for source in (Source("val", 1, 0), Source("other", 3, 1)):
        losses = []
        for sample in source.samples:
            x = tokens_of(sample.key, sample.grid)
            t, h, w = sample.grid
            positions = torch.cartesian_prod(torch.arange(t), torch.arange(h), torch.arange(w))
            losses.append((net(x, positions) - torch.tanh(x)).square().mean().item())
        expected.append(sum(losses) / len(losses))
    results = run_distributed(evaluated, 3, group=False)
    for result in results:
        assert result[0]["val_epoch/dataloader_idx_0"] == pytest.approx(expected[0], abs=1e-6)
        assert result[1]["val_epoch/dataloader_idx_1"] == pytest.approx(expected[1], abs=1e-6)


# ---- process groups
# -------------------------------------------------------------------------------------------


def timed(rank: int) -> dict[str, Any]:
    model_prices()
    timeouts: list[Any] = []
    make_group, init = dist.new_group, dist.init_process_group

    def spy_group(*args: Any, **kwargs: Any) -> Any:
        timeouts.append(kwargs.get("timeout"))
        return make_group(*args, **kwargs)

    def spy_init(*args: Any, **kwargs: Any) -> Any:
        timeouts.append(kwargs.get("timeout"))
        return init(*args, **kwargs)

    dist.new_group, dist.init_process_group = spy_group, spy_init
    torch.distributed.init_process_group = spy_init
    fitted({"strategy": ZelligeStrategy(timeout=timedelta(seconds=77)), "limit_train_batches": 1})
    return {"timeouts": timeouts, "groups": len(timeouts)}


def test_every_group_gets_the_timeout() -> None:
    for result in run_distributed(timed, 4, group=False):
        # Lightning waits without limit, in a group that it drops again, while one rank prepares data.
        assert set(result["timeouts"]) - {timedelta(days=10000)} == {timedelta(seconds=77)}
        assert result["groups"] > 4, "default, two for agreement and the rank sets"


def threaded(rank: int) -> int:
    model_prices()
    outcome: list[int] = []
    thread = threading.Thread(
        target=lambda: outcome.append(fitted({"limit_train_batches": 2})[0].global_step)
    )
    thread.start()
    thread.join(60)
    return outcome[0]


def test_fit_outside_of_the_main_thread() -> None:
    assert run_distributed(threaded, 2, group=False) == [2, 2]
