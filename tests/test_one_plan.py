"""Ranks that hold different plans, or an illegal one, are told so before the first exchange of a step."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.lightning.test_stream import Lanes, wrapped
from tests.lightning.toy import Toy, make_data, make_toy, make_trainer, model_prices
from zellige_lightning import ZelligeStrategy, lookahead
from zellige_lightning.agreement import Agreement
from zellige_lightning.batch import RankBatch, materialize
from zellige_lightning.errors import ZelligeError
from zellige_lightning.fingerprint import compare, report_of, require_one_plan
from zellige_lightning.placement import (
    Bucket,
    GlobalBatch,
    ParallelConfig,
    PlacementOption,
    Plan,
    RankSchedule,
    whole,
)

TIMEOUT_S, GRACE_S = 6.0, 2.0
BAD_STEP, BAD_RANK = 1, 1


# ---- a whole run in which one rank's plan is tampered with ----

Tamper = Callable[[list[Any]], None]
# What is changed in the [config, ranks] of every sequence of one rank's copy of the plan.
PLANS: dict[str, Tamper] = {
    "other order": lambda options: options.reverse(),
    "non-member": lambda options: options.__setitem__(0, [{"q": 1, "h": 2, "k": 1}, [0, 3]]),
    "duplicate": lambda options: options.__setitem__(0, [{"q": 1, "h": 2, "k": 1}, [1, 1]]),
    "no JSON": lambda options: options.__setitem__(0, None),
}


def tamper_with_text(mistake: str) -> None:
    """From now on, this process reads another plan than rank 0 has sent."""
    share = Agreement.share

    def tampered(self: Agreement, text: str | None, source: int = 0) -> str:
        shared = share(self, text, source)
        if '"waves"' not in shared:
            return shared
        found = json.loads(shared)
        for wave in found["waves"]:
            plan = json.loads(wave[1])
            if plan["step"] == BAD_STEP:
                PLANS[mistake](plan["options"])
            wave[1] = json.dumps(plan)
        return json.dumps(found)

    Agreement.share = tampered  # type: ignore[method-assign]


def exclude_rank(batch: RankBatch) -> None:
    """Gives this rank a block of whose rank set it is no member."""
    first, *rest = batch.schedule.blocks
    ranks = (*(r for r in first.ranks if r != BAD_RANK), 3)
    batch.schedule = replace(batch.schedule, blocks=(replace(first, ranks=ranks), *rest))


def tamper_with_schedule() -> None:
    read = lookahead.materialize

    def tampered(*args: Any, **kwargs: Any) -> RankBatch:
        batch = read(*args, **kwargs)
        if batch.plan.step == BAD_STEP:
            exclude_rank(batch)
        return batch

    lookahead.materialize = tampered


class Meddling(Toy):
    """A hook that changes what was planned, on one rank."""

    mistake = ""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch = super().on_before_batch_transfer(batch, dataloader_idx)
        if self.mistake == "late schedule" and batch.plan.step == BAD_STEP:
            exclude_rank(batch)
        if self.mistake == "late plan" and batch.plan.step == BAD_STEP:
            batch.plan = Plan(BAD_STEP, 3, batch.plan.options[::-1], (0, 0, 0), (0, 0, 0))
        return batch


def train_with(rank: int, mistake: str, debug: bool, data: str = "samples") -> dict[str, Any]:
    """What a rank raises, after how many steps, what it had exchanged of the bad one, and when it was
    raised."""
    model_prices()
    toy = make_toy(Meddling)
    if rank == BAD_RANK:
        toy.mistake = mistake
        if mistake in PLANS:
            tamper_with_text(mistake)
        elif mistake == "schedule":
            tamper_with_schedule()
    strategy = ZelligeStrategy(engine={"debug": debug}, timeout=timedelta(seconds=TIMEOUT_S))
    trainer = make_trainer(strategy)
    try:
        trainer.fit(toy, wrapped(Lanes()) if data == "stream" else make_data())
    except ZelligeError as error:
        return {
            "kind": type(error).__name__,
            "text": str(error),
            "steps": trainer.global_step,
            "began": len(toy.seen),
            "raised": time.monotonic(),
        }
    raise AssertionError("nothing failed")


BEFORE = "before the first exchange of step 1 (forward, layer 0)"


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("other order", (BEFORE, "rank 1 (step 1, digest", "has another plan", "sequence 0 of wave 0 is")),
        ("non-member", ("rank 1", BEFORE, "sequence 0 is placed on ranks (0, 3) of a world of 3")),
        ("duplicate", ("rank 1", BEFORE, "sequence 0 split (1, 2, 1): rank set (1, 1)")),
        ("no JSON", ("rank 1", BEFORE, "sequence 0: None is no configuration and rank set")),
        (
            "schedule",
            (BEFORE, "the schedule of ranks [1] is not what their plan says", "ranks (0, 2, 3)"),
        ),
    ],
)
def test_a_plan_that_differs_on_one_rank_stops_all_before_the_step(
    mistake: str, says: tuple[str, ...]
) -> None:
    found = run_distributed(train_with, 3, mistake, False, group=False)
    assert len({one["text"] for one in found}) == 1
    for one in found:
        assert all(part in one["text"] for part in says), one["text"]
        assert one["steps"] == one["began"] == BAD_STEP, "the step must not begin"


@pytest.mark.parametrize("mistake", ["other order", "duplicate"])
def test_a_plan_by_which_a_stream_would_send_samples_is_compared_first(mistake: str) -> None:
    found = run_distributed(train_with, 2, mistake, False, "stream", group=False)
    assert len({one["text"] for one in found}) == 1
    assert all(BEFORE in one["text"] and "rank 1" in one["text"] for one in found)
    assert {one["began"] for one in found} == {BAD_STEP}


@pytest.mark.parametrize(
    ("mistake", "debug"), [("late schedule", False), ("late plan", False), ("late plan", True)]
)
def test_a_change_after_the_agreement_stops_all(mistake: str, debug: bool) -> None:
    found = run_distributed(train_with, 3, mistake, debug, group=False)
    for one in found:
        assert one["kind"] == "EngineError"
        assert BEFORE in one["text"] and "rank" in one["text"] and one["steps"] == BAD_STEP
        assert one["began"] == BAD_STEP or one is not found[BAD_RANK]
        assert one["raised"] - found[BAD_RANK]["raised"] < TIMEOUT_S + GRACE_S


def collectives_of_preparation(rank: int) -> Counter[str]:
    """Calls of a run, apart from those of the main thread."""
    model_prices()
    called: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            called[name] += threading.current_thread() is not threading.main_thread()
            return call(*args, **kwargs)

        setattr(owner, name, counted)

    count(Agreement, "gather")
    count(Agreement, "share")
    count(lookahead.StepPreparer, "prepare")
    make_trainer(limit_train_batches=3).fit(make_toy(), make_data())
    return called


def test_comparing_costs_no_collective() -> None:
    """Of a step's preparation: one on the batch, one on the plan and its way to all, one on what was read."""
    for called in run_distributed(collectives_of_preparation, 2, group=False):
        assert called["prepare"] >= 3
        assert called["gather"] == 3 * called["prepare"] and called["share"] == called["prepare"]


# ---- the comparison itself ----


class Tokens:
    def __init__(self) -> None:
        self.samples: tuple[Any, ...] = ()
        self.token_fields: dict[str, Any] = {}
        self.sequence_fields: dict[str, Any] = {}

    def read_tokens(self, sequence: Any, tokens: range) -> dict[str, Any]:
        return {}

    def read_sequence(self, sequence: Any) -> dict[str, Any]:
        return {}


BATCH = GlobalBatch.of(7, 0, [("a", Bucket("video", (4, 4, 4))), ("b", Bucket("image", (1, 4, 4)))])
SPLIT = PlacementOption(ParallelConfig(1, 1, 3), (0, 1, 2))


def wave(rank: int, options: tuple[PlacementOption, ...], memory_mib: int = 0) -> RankBatch:
    plan = Plan(7, 3, options, (0, 0, 0), (memory_mib,) * 3)
    return materialize(BATCH, plan, rank, Tokens())  # type: ignore[arg-type]


def mistaken(rank: int, mistake: str) -> tuple[str, float]:
    """What a rank is told, and after how long."""
    agreement = Agreement(timedelta(seconds=2))
    batch = wave(rank, (SPLIT, whole(0)))
    if rank == 1 and mistake == "plan":
        batch = wave(rank, (whole(0), SPLIT))
    if rank == 1 and mistake == "memory":
        batch = wave(rank, (SPLIT, whole(0)), memory_mib=5)
    if rank == 1 and mistake == "schedule":
        batch.schedule = wave(rank, (whole(0), SPLIT)).schedule
    if rank == 1 and mistake == "no schedule":
        batch.schedule = RankSchedule(1, 3, ())
    if rank == 1 and mistake == "late":
        time.sleep(4.5)
    began = time.monotonic()
    try:
        report = report_of(8 if rank == 2 and mistake == "step" else 7, [batch], rank)
        require_one_plan(agreement, 7, agreement.gather(report), [batch])
    except ZelligeError as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("none", ""),
        (
            "plan",
            "sequence 0 of wave 0 is 64 tokens (1,1,3) on ranks (0, 1, 2) for them,"
            " 64 tokens (1,1,1) on ranks (0,) for it",
        ),
        ("memory", "other planned memory"),
        ("step", "rank 2 (step 8, digest"),
        ("schedule", "the schedule of ranks [1] is not what their plan says: sequence 1 split (1,1,3)"),
        ("no schedule", "not what their plan says: sequence 0 split (1,1,3) over ranks (0, 1, 2)"),
    ],
)
def test_whoever_differs_is_named_on_all_ranks(mistake: str, says: str) -> None:
    results = run_distributed(mistaken, 3, mistake)
    assert len({message for message, _ in results}) == 1
    message = results[0][0]
    assert bool(message) == bool(says) and says in message


def test_a_rank_that_does_not_come_is_reported_in_time() -> None:
    for message, elapsed_s in run_distributed(mistaken, 3, "late")[::2]:
        assert "the ranks' gather before a step failed" in message
        assert elapsed_s < 4


def test_of_two_ranks_the_second_is_said_to_differ() -> None:
    assert compare([(3, 5, 1), (3, 6, 1)]) == (0, [1])
    assert compare([(3, 5, 1), (3, 6, 1), (3, 6, 1)]) == (1, [0])
