"""The LightningModule: losses, empty ranks, validation and warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recipes.packing import block_diagonal
from zellige_lightning.batch import RankBatch, local_batch, materialize
from zellige_lightning.errors import ConfigError, DataError
from zellige_lightning.placement import (
    Bucket,
    GlobalBatch,
    ParallelConfig,
    PlacementOption,
    Plan,
    Sequence,
    whole,
)
from zellige_lightning.recipes.wan21.flow import FlowMatching
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.sources import FieldSpec, SyntheticSource

SOURCE = SyntheticSource(
    {"latents": FieldSpec((64,), torch.float16)}, {"text": FieldSpec((16, 64), torch.float16)}
)
BUCKETS = [Bucket("image", (1, 2, 3)), Bucket("video", (3, 2, 2)), Bucket("small", (1, 2, 2))]
SEQUENCES = tuple(Sequence(i, f"sample {i}", bucket) for i, bucket in enumerate(BUCKETS))
BATCH = GlobalBatch(0, 4, SEQUENCES, 3, sum(s.num_tokens for s in SEQUENCES))


@pytest.fixture
def module() -> WanModule:
    torch.manual_seed(0)
    module = WanModule("tiny", FlowMatching(seed=3, caption_dropout=0.5))
    torch.nn.init.normal_(module.model.head.head.weight, std=0.1)
    return module


def test_attention_modules_are_the_self_attentions(module: WanModule) -> None:
    assert list(module.attention_modules()) == ["model.blocks.0.self_attn", "model.blocks.1.self_attn"]


def test_loss_is_the_mean_over_samples_and_is_logged(
    module: WanModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: dict[str, Tensor] = {}
    monkeypatch.setattr(module, "log", lambda name, value, **kwargs: logged.update({name: value}))
    batch = local_batch(BATCH, SOURCE)
    with block_diagonal(module, batch.lengths):
        loss = module.training_step(batch, 0)
    alone = []
    for sequence in SEQUENCES:
        single = GlobalBatch(0, 4, (Sequence(0, sequence.key, sequence.bucket),), 1, sequence.num_tokens)
        alone.append(module.per_token_loss(local_batch(single, SOURCE), module.flow, 4).mean())
    torch.testing.assert_close(loss, torch.stack(alone).mean())
    assert logged == {"loss": loss}


def test_losses_by_bucket_are_means_over_samples_however_they_are_split(
    module: WanModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "per_token_loss", lambda batch, flow, draw: batch.positions.sum(1).float())
    monkeypatch.setattr(module, "log", lambda *args, **kwargs: None)
    half = PlacementOption(ParallelConfig(2, 1, 1), (0, 1))
    plan = Plan(0, 2, (whole(0), half, whole(0)), (0, 0), (0, 0))
    for rank in (0, 1):  # rank 1 has half of the video, and padding
        module.training_step(materialize(BATCH, plan, rank, SOURCE, pad=True), 0)
    total = module._trained.total()
    assert set(total) == {sequence.bucket.name for sequence in SEQUENCES}
    whole_batch = local_batch(BATCH, SOURCE)
    parts = whole_batch.positions.sum(1).float().split(whole_batch.lengths)
    for sequence, part in zip(whole_batch.sequences, parts, strict=True):
        is_video, loss, count = total[sequence.bucket.name]
        assert (is_video, count) == (sequence.bucket.is_video, 1.0)
        assert loss == pytest.approx(part.mean().item())
    assert module._trained.total() == {}


def test_samples_for_another_model_are_refused(module: WanModule) -> None:
    wide = SyntheticSource(SOURCE.token_fields, {"text": FieldSpec((16, 4096), torch.float16)})
    with pytest.raises(DataError, match="4096 in a row of their captions, the model reads 64 and 64"):
        module.training_step(local_batch(BATCH, wide), 0)


def test_a_dropped_caption_is_an_empty_one(module: WanModule) -> None:
    flow = FlowMatching(seed=3, caption_dropout=1.0)
    kept = FlowMatching(seed=3, caption_dropout=0.0)
    batch = local_batch(GlobalBatch(0, 0, SEQUENCES[:1], 1, 6), SOURCE)
    dropped = module.per_token_loss(batch, flow, 0)
    assert not torch.allclose(dropped, module.per_token_loss(batch, kept, 0))
    batch.context["text"].zero_()
    torch.testing.assert_close(dropped, module.per_token_loss(batch, kept, 0))


def test_noise_of_a_split_sequence_is_that_of_the_whole(module: WanModule) -> None:
    split = PlacementOption(ParallelConfig(2, 1, 1), (0, 1))
    plan = Plan(0, 2, (whole(1), split, whole(0)), (0, 0), (0, 0))
    parts = [materialize(BATCH, plan, rank, SOURCE) for rank in (0, 1)]
    inputs = [
        module.flow.inputs(4, b.sequences, [s.tokens for s in b.segments], b.tokens["latents"]) for b in parts
    ]
    one = local_batch(BATCH, SOURCE)
    expected = module.flow.inputs(4, one.sequences, [s.tokens for s in one.segments], one.tokens["latents"])
    # rank 0: half of the video, the small image; rank 1: the other half, the image
    video = torch.cat((inputs[0].tokens[:6], inputs[1].tokens[:6]))
    assert torch.equal(torch.cat((inputs[1].tokens[6:], video, inputs[0].tokens[6:])), expected.tokens)
    assert inputs[0].timesteps[0] == inputs[1].timesteps[0] == expected.timesteps[1]


def test_a_rank_without_work_gives_zero_gradients(module: WanModule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "log", lambda *args, **kwargs: None)
    plan = Plan(0, 2, (whole(0),) * 3, (0, 0), (0, 0))
    empty = materialize(BATCH, plan, 1, SOURCE)
    with block_diagonal(module, []):
        loss = module.training_step(empty, 0)
        loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


def validate(
    module: WanModule, batches: list[RankBatch], monkeypatch: pytest.MonkeyPatch
) -> dict[str, float]:
    logged: dict[str, Any] = {}
    monkeypatch.setattr(module, "log", lambda name, value, **kwargs: logged.update({name: value}))
    module.on_validation_epoch_start()
    with torch.no_grad():
        for batch in batches:
            with block_diagonal(module, batch.lengths):
                module.validation_step(batch, 0)
    module.on_validation_epoch_end()
    return logged


def test_validation_is_the_same_however_samples_are_dealt(
    module: WanModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = validate(module, [local_batch(BATCH, SOURCE)], monkeypatch)
    singles = [
        GlobalBatch(i, 9, (Sequence(0, s.key, s.bucket),), 1, s.num_tokens) for i, s in enumerate(SEQUENCES)
    ]
    apart = validate(module, [local_batch(batch, SOURCE) for batch in singles], monkeypatch)
    assert set(together) == {
        *("val_loss", "val_loss_image", "val_loss_video"),
        *(f"val_loss/{name}" for name in ("image", "video", "small")),
    }
    both = together["val_loss/image"] + together["val_loss/small"]
    assert together["val_loss_image"] == pytest.approx(both / 2)
    assert together["val_loss"] == pytest.approx((both + together["val_loss_video"]) / 3)
    assert together == pytest.approx(apart, rel=1e-4)
    halves = Plan(
        0, 2, (whole(0), PlacementOption(ParallelConfig(2, 1, 1), (0, 1)), whole(0)), (0, 0), (0, 0)
    )
    parts = [materialize(BATCH, halves, rank, SOURCE) for rank in (0, 1)]
    with (
        monkeypatch.context() as patch
    ):  # a loss that needs no attention, since nothing here joins the halves
        patch.setattr(module, "per_token_loss", lambda batch, flow, draw: batch.positions.sum(1).float())
        expected = validate(module, [local_batch(BATCH, SOURCE)], patch)
        assert validate(module, parts, patch) == pytest.approx(expected)
    images_only = validate(module, [local_batch(singles[0], SOURCE)], monkeypatch)
    assert set(images_only) == {"val_loss", "val_loss_image", "val_loss/image"}


def rates(module: WanModule, steps: int) -> list[float]:
    configured = module.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"] / module.lr)
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    return found


def test_the_rate_rises_to_its_value_and_stays() -> None:
    module = WanModule("tiny", warmup_steps=4)
    assert rates(module, 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_a_cosine_falls_to_its_end() -> None:
    module = WanModule("tiny", schedule="cosine", warmup_steps=2, decay_steps=6, min_lr_ratio=0.1)
    half = 0.45 * 2**-0.5
    assert rates(module, 8) == pytest.approx([0.5, 1.0, 1.0, 0.55 + half, 0.55, 0.55 - half, 0.1, 0.1])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"schedule": "linear"}, "constant, cosine"),
        ({"schedule": "cosine"}, "ends at step None"),
        ({"schedule": "cosine", "decay_steps": 100}, "100 warm-up steps"),
        ({"min_lr_ratio": 2.0}, "min_lr_ratio=2.0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        WanModule("tiny", **settings)
    with pytest.raises(ConfigError, match="choose one of tiny"):
        WanModule("huge")
