"""The objective's draws: functions of (seed, epoch, key, frame) and of nothing else."""

from __future__ import annotations

import pytest
import torch

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement import Bucket, Sequence
from zellige_lightning.placement.schedule import shard
from zellige_lightning.recipes.wan21.flow import FlowMatching, bell_weight, per_token_loss, shifted

VIDEO = Sequence(0, "clip", Bucket("video", (5, 3, 4)))
IMAGE = Sequence(1, "photo", Bucket("image", (1, 3, 5)))
FLOW = FlowMatching(seed=7)
SIGMA = 0.3168010038713392
NOISE = [0.9960200, 1.3168503, -0.0488923]


@pytest.mark.parametrize("degree", [2, 3, 7, 60])
def test_shards_draw_the_rows_of_the_whole(degree: int) -> None:
    whole = FLOW.noise(2, VIDEO, range(60))
    parts = [FLOW.noise(2, VIDEO, shard(60, i, degree)) for i in range(degree)]
    assert torch.equal(torch.cat(parts), whole)


def test_a_shard_draws_only_the_frames_that_it_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    original = FlowMatching._frame_noise

    def count(self: FlowMatching, epoch: int, key: str, frame: int, per_frame: int) -> torch.Tensor:
        drawn.append(frame)
        return original(self, epoch, key, frame, per_frame)

    monkeypatch.setattr(FlowMatching, "_frame_noise", count)
    FLOW.noise(0, VIDEO, range(12, 25))
    assert drawn == [1, 2]
    assert FLOW.noise(0, VIDEO, range(30, 30)).shape == (0, 64)
    assert drawn == [1, 2]


def test_draws_differ_by_seed_epoch_key_and_frame_but_not_by_place_in_the_batch() -> None:
    rows = range(12)
    base = FLOW.noise(0, VIDEO, rows)
    assert torch.equal(base, FLOW.noise(0, Sequence(9, "clip", VIDEO.bucket), rows))
    others = [
        FlowMatching(seed=8).noise(0, VIDEO, rows),
        FLOW.noise(1, VIDEO, rows),
        FLOW.noise(0, Sequence(0, "clip2", VIDEO.bucket), rows),
        FLOW.noise(0, VIDEO, range(12, 24)),
        FLOW.for_evaluation(0).noise(0, VIDEO, rows),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack((base.flatten(), other.flatten())))[0, 1]) < 0.15
    assert FLOW.sigma(0, VIDEO) != FLOW.sigma(1, VIDEO)


def test_draws_of_a_seed_never_change() -> None:
    """A resumed run continues with the noise of the run that it resumes, also after an upgrade."""
    assert FLOW.sigma(0, VIDEO) == pytest.approx(SIGMA, abs=1e-9)
    assert FLOW.noise(0, VIDEO, range(59, 60))[0, :3].tolist() == pytest.approx(NOISE, abs=1e-6)


def test_target_and_noised_tokens_belong_together() -> None:
    g = torch.Generator().manual_seed(0)
    latents = torch.randn(20 + 15, 64, generator=g)
    parts = [range(40, 60), range(15)]
    inputs = FLOW.inputs(3, [VIDEO, IMAGE], parts, latents)
    assert inputs.timesteps.tolist() == pytest.approx([1000 * FLOW.sigma(3, s) for s in (VIDEO, IMAGE)])
    s = (inputs.timesteps / 1000.0).repeat_interleave(torch.tensor([20, 15]))[:, None]
    noise = torch.cat([FLOW.noise(3, q, r) for q, r in zip((VIDEO, IMAGE), parts, strict=True)])
    torch.testing.assert_close(inputs.tokens - s * inputs.target, latents, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.tokens + (1 - s) * inputs.target, noise, rtol=1e-5, atol=1e-5)
    assert not per_token_loss(noise - latents, inputs.target).any()


def test_bf16_latents_round_neither_time_nor_noise() -> None:
    latents = torch.zeros(60, 64, dtype=torch.bfloat16)
    inputs = FLOW.inputs(0, [VIDEO], [range(60)], latents)
    assert inputs.tokens.dtype == inputs.timesteps.dtype == torch.float32
    assert inputs.timesteps.item() == pytest.approx(1000 * FLOW.sigma(0, VIDEO), rel=1e-6)
    assert torch.equal(inputs.target, FLOW.noise(0, VIDEO, range(60)))


def test_a_rank_without_segments() -> None:
    inputs = FLOW.inputs(0, [], [], torch.zeros(0, 64))
    assert inputs.tokens.shape == inputs.target.shape == (0, 64)
    assert inputs.timesteps.shape == inputs.dropped.shape == (0,)


@pytest.mark.parametrize(("shift", "quantiles"), [(1.0, (0.22, 0.5, 0.78)), (3.0, (0.45, 0.75, 0.92))])
def test_times_are_shifted_logit_normal(shift: float, quantiles: tuple[float, ...]) -> None:
    flow = FlowMatching(shift=1.0, bucket_shifts={"image": shift})
    sigmas = torch.tensor([flow.sigma(0, Sequence(0, f"photo {i}", IMAGE.bucket)) for i in range(4000)])
    measured = sigmas.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
    assert measured == pytest.approx(quantiles, abs=0.02)


def test_captions_are_dropped_as_often_as_asked_and_never_in_evaluation() -> None:
    keys = [f"photo {i}" for i in range(4000)]
    dropped = sum(FLOW.drops_caption(0, key) for key in keys)
    assert 0.08 < dropped / len(keys) < 0.12
    assert not any(FLOW.for_evaluation(0).drops_caption(0, key) for key in keys)


def test_diffsynth_draws_one_of_a_thousand_shifted_steps() -> None:
    flow = FlowMatching(times="steps", weighting="bell", shift=5.0)
    steps = {shifted(1.0 - i / 1000, 5.0) for i in range(1000)}
    drawn = [flow.sigma(0, Sequence(0, f"photo {i}", IMAGE.bucket)) for i in range(4000)]
    assert set(drawn) <= steps
    assert sum(drawn) / len(drawn) == pytest.approx(sum(steps) / 1000, abs=0.01)
    weights = [flow.weight(sigma, IMAGE.bucket) for sigma in steps]
    assert sum(weights) / 1000 == pytest.approx(1.0)
    assert (min(weights), max(weights)) == (0.0, pytest.approx(2.076, abs=1e-3))
    assert flow.weight(1.0, IMAGE.bucket) == 0.0
    assert FLOW.weight(1.0, IMAGE.bucket) == 1.0


def test_weights_are_those_of_each_segments_own_time() -> None:
    flow = FlowMatching(times="steps", weighting="bell", bucket_shifts={"image": 2.0})
    inputs = flow.inputs(1, [VIDEO, IMAGE], [range(5), range(3)], torch.zeros(8, 64))
    expected = [bell_weight(flow.sigma(1, VIDEO), 3.0), bell_weight(flow.sigma(1, IMAGE), 2.0)]
    assert inputs.weights.tolist() == pytest.approx(expected)
    assert flow.for_evaluation(0).inputs(1, [VIDEO], [range(5)], torch.zeros(5, 64)).weights.tolist() == [1.0]


def test_uniform_times_are_uniform_before_the_shift() -> None:
    flow = FlowMatching(times="uniform", shift=1.0)
    drawn = torch.tensor([flow.sigma(0, Sequence(0, f"photo {i}", IMAGE.bucket)) for i in range(4000)])
    assert drawn.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist() == pytest.approx([0.1, 0.5, 0.9], abs=0.03)


@pytest.mark.parametrize(
    "settings",
    [
        {"times": "normal"},
        {"weighting": "min_snr"},
        {"shift": 0.0},
        {"bucket_shifts": {"a": -1.0}},
        {"caption_dropout": 1.5},
        {"logit_std": float("nan")},
    ],
)
def test_impossible_objectives_are_refused(settings: dict) -> None:
    with pytest.raises(ConfigError, match=r"flow\."):
        FlowMatching(**settings)
