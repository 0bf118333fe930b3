"""`Trainer(strategy="zellige_fsdp2")`: exact training, checkpoints that are whole or refused, models that are
built without memory."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed import run_distributed, run_outcomes
from tests.invariance.reference import WAN
from tests.lightning.killed import Data
from tests.lightning.test_exact import train
from tests.lightning.test_resume import Stopped
from tests.lightning.toy import (
    Toy,
    digest,
    flat,
    largest_difference,
    make_data,
    make_toy,
    make_trainer,
    model_prices,
    reference_training,
    whole_tensor,
)
from zellige_lightning import ZelligeDataModule, memory_budget, sharded_checkpoint
from zellige_lightning.batch import RankBatch
from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.fsdp2 import order_communicators
from zellige_lightning.last_checkpoint import StepCheckpoint
from zellige_lightning.recipes.wan21.config import WanConfig
from zellige_lightning.recipes.wan21.export import main
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.sharded_checkpoint import CHECKSUMS, ShardedTensors

NAME = "zellige_fsdp2"


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ({"limit_val_batches": 1.0, "max_epochs": 2}, {}),
        ({"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "limit_train_batches": 3}, {"window": 2,
        "clip_norm": 0.05}),
        pytest.param({"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"}, {"clip_value": 0.002},
        marks=pytest.mark.slow),
    ],
    ids=["epochs with validation", "window and clip by norm", "clip by value"],
)  # fmt: skip
def test_training_equals_one_process(settings: dict[str, Any], reference: dict[str, Any]) -> None:
    results = run_distributed(train, 3, {"strategy": NAME, **settings}, group=False)
    assert len({result["digest"] for result in results}) == 1 and results[0]["splits"] > 0
    parameters, losses = reference_training(results[0]["batches"], **reference)
    assert largest_difference(results[0]["parameters"], parameters) < 1e-6
    if not reference:
        assert results[0]["losses"] == pytest.approx(losses, abs=1e-5)


class CallsItself(Toy):
    """Goes through its own `forward`, as many do, and holds a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.5]))

    def forward(self, batch: RankBatch) -> Tensor:
        return self.net(batch.tokens["x"], batch.positions) * self.scale

    def per_token(self, batch: RankBatch) -> Tensor:
        return (self(batch) - torch.tanh(batch.tokens["x"])).square().mean(-1)


def through_forward(rank: int) -> dict[str, list[float]]:
    model_prices()
    found = {}
    for strategy in ("zellige", NAME):
        trainer, toy = make_trainer(strategy), make_toy(CallsItself)
        trainer.fit(toy, make_data())
        assert all(isinstance(p, DTensor) == (strategy == NAME) for p in toy.parameters())
        found[strategy] = flat(toy)
    return found


def test_a_module_that_calls_itself_trains_alike() -> None:
    first, second = run_distributed(through_forward, 2, group=False)
    assert first == second and largest_difference(first["zellige"], first[NAME]) < 1e-6


def test_collectives_are_ordered_where_nccl_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 21, 5))
    order_communicators(torch.device("cpu"))
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" not in os.environ
    with pytest.warns(UserWarning, match=r"NCCL \(2, 21, 5\) cannot order"):
        order_communicators(torch.device("cuda"))
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"


# ---- checkpoints -------------------------------------------------------------------------------------------


def saved(rank: int, path: str) -> dict[str, Any]:
    model_prices()
    trainer, toy = make_trainer(NAME, limit_train_batches=1), make_toy()
    trainer.fit(toy, make_data())
    trainer.save_checkpoint(path)
    return {n: whole_tensor(p).numpy() for n, p in toy.named_parameters()}


def opened(rank: int, path: str, model: type[Toy] = Toy) -> bytes:
    model_prices()
    trainer, toy = make_trainer(NAME, max_steps=1), make_toy(model)
    with torch.no_grad():
        for parameter in toy.parameters():
            parameter.zero_()
    trainer.fit(toy, make_data(), ckpt_path=path)
    return digest(toy)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("saved") / "run.ckpt"
    return path, run_distributed(saved, 2, str(path), group=False)[0]


def test_a_checkpoint_is_read_tensor_by_tensor(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    path, values = checkpoint
    stored = ShardedTensors(path)
    assert set(stored) == set(values)
    assert all(torch.equal(stored[n].detach(), torch.from_numpy(v)) for n, v in values.items())


@pytest.fixture
def copied(checkpoint: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    for file in checkpoint[0].iterdir():
        (tmp_path / "copy.ckpt").mkdir(exist_ok=True)
        (tmp_path / "copy.ckpt" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "copy.ckpt"


@pytest.mark.parametrize("damage", ["a flipped bit", "a missing file"])
def test_a_damaged_checkpoint_is_refused_on_all_ranks(damage: str, copied: Path) -> None:
    file = sorted(copied.glob("*.distcp"))[1]
    if damage == "a missing file":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    for outcome in run_outcomes(opened, 2, str(copied), group=False):
        assert outcome.error is not None and outcome.error[0] == "DataError"
        assert f"is damaged: {file.name}" in outcome.error[1]


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_a_forged_description_is_not_run(copied: Path) -> None:
    (copied / ".metadata").write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(DataError, match="it names builtins.print"):
        ShardedTensors(copied)


def failing(rank: int, path: str) -> list[str]:
    """Rank 1 runs out of disk space while it saves over a checkpoint."""
    model_prices()
    trainer, toy = make_trainer(NAME, limit_train_batches=1), make_toy()
    trainer.fit(toy, make_data())
    save = sharded_checkpoint.dcp.save

    def full(*args: Any, **kwargs: Any) -> Any:
        save(*args, **kwargs)
        if rank == 1:
            raise OSError(28, "No space left on device")

    sharded_checkpoint.dcp.save = full
    try:
        trainer.save_checkpoint(path)
    except DataError as error:
        return [str(error)]
    return []


def test_a_disk_that_is_full_costs_nothing_that_was_saved(copied: Path) -> None:
    before = {file.name: file.read_bytes() for file in copied.iterdir()}
    for errors in run_distributed(failing, 2, str(copied), group=False):
        assert len(errors) == 1 and "rank 1 cannot write" in errors[0] and "No space left" in errors[0]
    assert {file.name: file.read_bytes() for file in copied.iterdir()} == before
    assert CHECKSUMS in before


def test_saving_again_replaces_the_folder(copied: Path) -> None:
    run_distributed(saved, 1, str(copied), group=False)
    assert [file.name for file in copied.parent.iterdir()] == [copied.name]
    assert not list(copied.glob("__1_*")), "files of the checkpoint that was replaced are left"


def test_a_kill_while_a_folder_is_replaced_costs_nothing(copied: Path) -> None:
    """Between its two renames the folder has neither name."""
    copied.rename(copied.with_name(".last.ckpt.replaced"))
    callback = StepCheckpoint(str(copied.parent), save_last=True)
    assert callback._find_last_checkpoints(Trainer(logger=False)) == {str(copied.with_name("last.ckpt"))}
    assert set(ShardedTensors(copied.with_name("last.ckpt")))


class WithAdam(Toy):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def crosswise(rank: int, sharded: str, folder: str) -> str:
    """Train to a file under `zellige`; open that sharded, and in a model that has no memory yet, and then the
    folder unsharded."""
    model_prices()
    whole, file = make_toy(WithAdam), f"{folder}/whole.ckpt"
    trainer = make_trainer("zellige", limit_train_batches=1)
    trainer.fit(whole, make_data())
    trainer.save_checkpoint(file)
    assert opened(rank, file, WithAdam) == digest(whole)
    with torch.device("meta"):
        built = WithAdam()
    make_trainer("zellige", max_steps=1).fit(built, make_data(), ckpt_path=file)
    assert digest(built) == digest(whole)
    try:
        make_trainer("zellige").fit(make_toy(), make_data(), ckpt_path=sharded)
    except ConfigError as error:
        return str(error)
    return ""


def test_a_file_opens_sharded_and_a_folder_is_refused_unsharded(copied: Path, tmp_path: Path) -> None:
    for text in run_distributed(crosswise, 2, str(copied), str(tmp_path), group=False):
        assert "holds sharded parameters" in text and "zellige_fsdp2" in text


def stopped(rank: int, folder: str) -> dict[str, Any]:
    """Rank 1 is asked to stop in its second step."""
    model_prices()
    kept = OnExceptionCheckpoint(folder, filename="stopped")
    trainer = make_trainer(NAME, callbacks=[kept], enable_checkpointing=True)
    toy = make_toy(Stopped, stopped_rank=1, at=2, how="sigterm")
    try:
        trainer.fit(toy, make_data())
    except SIGTERMException:
        return {"steps": trainer.global_step}
    return {"steps": None}


def test_sigterm_stops_all_ranks_with_a_checkpoint(tmp_path: Path) -> None:
    first, second = run_distributed(stopped, 2, str(tmp_path), group=False)
    assert first == second and first["steps"] is not None and first["steps"] <= 4
    assert len(set(run_distributed(opened, 2, str(tmp_path / "stopped.ckpt"), group=False))) == 1


# ---- models that are built without memory ------------------------------------------------------------------


class Still(WanModule):
    """Trains with rate 0: what is saved is what was initialized. Saves a running average besides."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["current_model_state"] = checkpoint["state_dict"]
        checkpoint["state_dict"] = {n: 0.5 * p for n, p in checkpoint["state_dict"].items()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)


SMALL = WanConfig(
    dim=WAN["dim"], ffn_dim=80, num_heads=WAN["heads"], num_layers=6, text_dim=10, text_len=5,
    freq_dim=WAN["freq"],
)  # fmt: skip


def initialized(rank: int, path: str) -> dict[str, Any]:
    model_prices()
    torch.manual_seed(7 + rank)  # the values are to be rank 0's
    module = Still(SMALL, meta_device=True)
    assert all(p.is_meta for p in module.parameters())
    trainer = make_trainer(NAME, max_steps=1)
    trainer.fit(module, ZelligeDataModule(Data(), tokens_per_batch=200))
    trainer.save_checkpoint(path)
    return {n: whole_tensor(p).numpy() for n, p in module.named_parameters()}


def test_a_model_without_memory_is_initialized_sharded_and_exported(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    first, second = run_distributed(initialized, 2, str(path), group=False)
    assert all((first[name] == second[name]).all() for name in first)
    usual = dict(WanModule(SMALL).named_parameters())
    assert set(first) == set(usual)
    for name, expected in usual.items():
        drawn, like = torch.from_numpy(first[name]), expected.detach()
        assert drawn.std() == pytest.approx(float(like.std()), rel=0.5, abs=1e-6), name
    options = ("--dtype", "float32", "--layout", "original", "--num-heads", "12")
    for folder, average, scale in (("trained", (), 1.0), ("average", ("--ema",), 0.5)):
        main([str(path), str(tmp_path / folder), *options, *average])
        exported = load_file(tmp_path / folder / "diffusion_pytorch_model.safetensors")
        for name, values in first.items():
            assert torch.equal(exported[name.removeprefix("model.")], scale * torch.from_numpy(values))


def too_large(rank: int) -> None:
    memory_budget.host_memory = lambda: 64 << 30
    trainer = make_trainer("zellige", limit_train_batches=1)
    trainer.fit(WanModule("wan21_14b", meta_device=True), make_data())


def test_a_model_that_fits_on_no_rank_is_refused_before_it_takes_memory() -> None:
    for outcome in run_outcomes(too_large, 2, group=False):
        assert outcome.error is not None and outcome.error[0] == "ConfigError", outcome.trace
        assert "14.3 billion parameters" in outcome.error[1] and "zellige_fsdp2" in outcome.error[1]
