"""What ranks get of a planned batch: every token once, with its own position, and weights that add up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zellige_lightning.batch import RankBatch, materialize, positions_of
from zellige_lightning.errors import DataError
from zellige_lightning.placement import (
    Bucket,
    GlobalBatch,
    ParallelConfig,
    PlacementOption,
    Plan,
    Sequence,
    whole,
)
from zellige_lightning.sources import FieldSpec, SyntheticSource

GRIDS = [(1, 1, 1), (1, 2, 3), (1, 5, 7), (3, 2, 4), (9, 3, 5)]
SOURCE = SyntheticSource(
    {"latents": FieldSpec((4,), torch.bfloat16), "index": FieldSpec((), torch.float64)},
    {"text": FieldSpec((3, 2), torch.float32)},
)


def make_batch(rng: random.Random, count: int) -> GlobalBatch:
    samples = [(f"s{i}", Bucket(f"b{i}", rng.choice(GRIDS))) for i in range(count)]
    return GlobalBatch.of(3, 1, samples)


def make_plan(rng: random.Random, batch: GlobalBatch, world: int) -> Plan:
    configs = [ParallelConfig(q, h, k) for q in (1, 2, 3) for h in (1, 2) for k in (1, 2)]
    options = []
    for _ in batch.sequences:
        config = rng.choice([c for c in configs if c.degree <= world])
        options.append(PlacementOption(config, tuple(sorted(rng.sample(range(world), config.degree)))))
    return Plan(batch.step, world, tuple(options), (0,) * world, (0,) * world)


def made(seed: int, count: int = 7) -> tuple[GlobalBatch, list[RankBatch]]:
    rng = random.Random(seed)
    world = rng.choice([1, 2, 3, 5, 8])
    batch = make_batch(rng, count)
    plan = make_plan(rng, batch, world)
    return batch, [materialize(batch, plan, rank, SOURCE) for rank in range(world)]


def per_token_loss(batch: RankBatch) -> Tensor:
    """A function of the token alone, so that it does not depend on the placement."""
    return batch.tokens["index"] ** 2 + batch.positions.double().sum(1)


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_on_one_rank_with_its_own_position(seed: int) -> None:
    batch, ranks = made(seed)
    seen: dict[int, list[tuple[int, ...]]] = {s.index: [] for s in batch.sequences}
    for rank_batch in ranks:
        local = [s.index for s in rank_batch.sequences]
        assert rank_batch.num_tokens == len(rank_batch.positions) == sum(rank_batch.lengths)
        for token, segment in enumerate(rank_batch.segment_ids.tolist()):
            seen[local[segment]].append(tuple(rank_batch.positions[token].tolist()))
    for sequence in batch.sequences:
        frames, rows, columns = sequence.bucket.grid
        assert sorted(seen[sequence.index]) == [
            (t, y, x) for t in range(frames) for y in range(rows) for x in range(columns)
        ]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_the_rows_of_the_whole_sample(seed: int) -> None:
    batch, ranks = made(seed)
    for rank_batch in ranks:
        offsets = rank_batch.schedule.offsets
        for i, (segment, sequence) in enumerate(zip(rank_batch.segments, rank_batch.sequences, strict=True)):
            whole_rows = SOURCE.read_tokens(sequence, range(sequence.num_tokens))
            mine = slice(offsets[i], offsets[i + 1])
            for name, rows in whole_rows.items():
                part = rows[segment.tokens.start : segment.tokens.stop]
                assert torch.equal(rank_batch.tokens[name][mine], part)
            assert torch.equal(rank_batch.context["text"][i], SOURCE.read_sequence(sequence)["text"])
            assert bool((rank_batch.segment_ids[mine] == i).all())
        assert len(rank_batch.context["text"]) == len(rank_batch.segments)
        assert rank_batch.epoch == batch.epoch


def true_loss(batch: GlobalBatch, loss_reduction: str) -> float:
    """The mean over sequences of their token means, or the mean over tokens."""
    losses = []
    for sequence in batch.sequences:
        index = SOURCE.read_tokens(sequence, range(sequence.num_tokens))["index"]
        positions = positions_of(range(sequence.num_tokens), sequence.bucket.grid)
        losses.append(index**2 + positions.double().sum(1))
    if loss_reduction == "token":
        return float(torch.cat(losses).mean())
    return float(torch.stack([x.mean() for x in losses]).mean())


@pytest.mark.parametrize("loss_reduction", ["sequence", "token"])
@pytest.mark.parametrize("seed", range(10))
def test_the_mean_over_ranks_is_the_loss_of_the_batch(seed: int, loss_reduction: str) -> None:
    rng = random.Random(seed)
    world = rng.choice([1, 2, 4, 8])
    batch = make_batch(rng, 9)
    plan = make_plan(rng, batch, world)
    local = [materialize(batch, plan, rank, SOURCE, loss_reduction=loss_reduction) for rank in range(world)]
    mean = sum(float(b.reduce(per_token_loss(b))) for b in local) / world
    assert mean == pytest.approx(true_loss(batch, loss_reduction), rel=1e-12)


@pytest.mark.parametrize("loss_reduction", ["sequence", "token"])
def test_micro_batches_of_a_window_weigh_by_what_they_hold(loss_reduction: str) -> None:
    """The trainer divides each loss by the number of micro-batches; their sum is the loss of the window."""
    rng, world = random.Random(0), 3
    samples = [(f"s{i}", Bucket(f"b{i}", rng.choice(GRIDS))) for i in range(9)]
    together = GlobalBatch.of(0, 1, samples)
    total = 0.0
    for part in (samples[:2], samples[2:]):
        sequences = tuple(Sequence(i, key, bucket) for i, (key, bucket) in enumerate(part))
        batch = GlobalBatch(0, 1, sequences, len(samples), together.num_tokens)
        plan = make_plan(rng, batch, world)
        for rank in range(world):
            local = materialize(batch, plan, rank, SOURCE, accumulation=2, loss_reduction=loss_reduction)
            total += float(local.reduce(per_token_loss(local))) / world / 2
    assert total == pytest.approx(true_loss(together, loss_reduction), rel=1e-12)


def test_a_rank_without_tokens_still_has_a_loss() -> None:
    batch = GlobalBatch.of(0, 0, [("a", Bucket("a", (1, 2, 3)))])
    idle = materialize(batch, Plan(0, 2, (whole(0),), (0, 0), (0, 0)), 1, SOURCE)
    assert idle.num_tokens == 0 and idle.segments == ()
    assert {n: tuple(t.shape) for n, t in idle.tokens.items()} == {"latents": (0, 4), "index": (0,)}
    assert idle.tokens["latents"].dtype == torch.bfloat16
    assert idle.context["text"].shape == (0, 3, 2)
    assert idle.positions.shape == (0, 3) and idle.positions.dtype == torch.int64
    assert idle.segment_ids.dtype == torch.int64
    per_token = torch.zeros(0, requires_grad=True)
    loss = idle.reduce(per_token)
    loss.backward()
    assert float(loss.detach()) == 0.0 and per_token.grad is not None


@pytest.mark.parametrize(
    ("dtype", "reduced"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_losses_are_summed_in_single_precision_at_least(dtype: torch.dtype, reduced: torch.dtype) -> None:
    _, ranks = made(1)
    loss = ranks[0].reduce(torch.ones(ranks[0].num_tokens, dtype=dtype))
    assert loss.dtype == reduced and loss.shape == ()


def test_a_loss_of_another_shape_is_refused() -> None:
    _, ranks = made(1)
    n = ranks[0].num_tokens
    for wrong in (torch.zeros(n, 4), torch.zeros(n + 1), torch.zeros(())):
        with pytest.raises(DataError, match=f"this rank has {n} tokens"):
            ranks[0].reduce(wrong)


def test_moving_keeps_everything() -> None:
    _, ranks = made(2)
    moved = ranks[0].to("meta")
    assert moved.positions.device.type == moved.segment_ids.device.type == "meta"
    assert moved.token_weights.device.type == "meta"
    assert all(t.device.type == "meta" for t in (*moved.tokens.values(), *moved.context.values()))
    assert (moved.schedule, moved.plan, moved.global_batch) == (
        ranks[0].schedule,
        ranks[0].plan,
        ranks[0].global_batch,
    )
    assert {n: t.shape for n, t in moved.tokens.items()} == {n: t.shape for n, t in ranks[0].tokens.items()}


Spoil = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: {"index": f["index"]}, "field 'latents' is nothing"),
        (
            lambda f: f | {"latents": f["latents"][:-1]},
            r"bfloat16 \(5, 4\), expected torch.bfloat16 \(6, 4\)",
        ),
        (lambda f: f | {"latents": f["latents"].float()}, "is torch.float32"),
        (lambda f: f | {"latents": f["latents"][:, :3]}, r"\(6, 3\), expected"),
    ],
)
def test_a_source_that_does_not_keep_its_word_is_named(spoil: Spoil, message: str) -> None:
    class Liar(SyntheticSource):
        def read_tokens(self, sequence: Sequence, tokens: range) -> dict[str, Tensor]:
            return spoil(super().read_tokens(sequence, tokens))

    batch = GlobalBatch.of(0, 0, [("the sample", Bucket("a", (1, 2, 3)))])
    plan = Plan(0, 1, (whole(0),), (0,), (0,))
    with pytest.raises(DataError, match=f"sample 'the sample': .*{message}"):
        materialize(batch, plan, 0, Liar(SOURCE.token_fields, SOURCE.sequence_fields))


def test_sequence_fields_are_checked_too() -> None:
    class Liar(SyntheticSource):
        def read_sequence(self, sequence: Sequence) -> dict[str, Tensor]:
            return {"text": torch.zeros(3)}

    batch = GlobalBatch.of(0, 0, [("the sample", Bucket("a", (1, 2, 3)))])
    plan = Plan(0, 1, (whole(0),), (0,), (0,))
    with pytest.raises(DataError, match=r"field 'text' is torch.float32 \(3,\)"):
        materialize(batch, plan, 0, Liar(SOURCE.token_fields, SOURCE.sequence_fields))


def test_the_plan_of_another_batch_is_refused() -> None:
    batch = GlobalBatch.of(4, 0, [("a", Bucket("a", (1, 2, 3)))])
    with pytest.raises(DataError, match=r"\[step 4\] the plan places 2 sequences, the batch has 1"):
        materialize(batch, Plan(4, 1, (whole(0),) * 2, (0,), (0,)), 0, SOURCE)


def test_positions_count_frames_rows_and_columns() -> None:
    assert positions_of(range(5, 8), (2, 2, 3)).tolist() == [[0, 1, 2], [1, 0, 0], [1, 0, 1]]
    assert positions_of(range(3, 3), (2, 2, 3)).shape == (0, 3)
