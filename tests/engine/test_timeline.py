"""A recorded step: what each rank computed, exchanged and waited for, in a file that viewers read."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed import run_distributed
from tests.engine.mixes import Mix, attend, make_engine
from tests.engine.threads import run_threads
from zellige_lightning.agreement import Agreement
from zellige_lightning.engine import CoalescedAttentionEngine, checkpoint
from zellige_lightning.engine.timeline import Span
from zellige_lightning.placement import ParallelConfig, PlacementOption, whole
from zellige_lightning.step_trace import chrome_trace, write_trace

OPTIONS = (
    PlacementOption(ParallelConfig(1, 2, 1), (0, 1)),
    PlacementOption(ParallelConfig(1, 1, 3), (0, 1, 2)),
    whole(2),
)
MIX = Mix(3, (33, 20, 9), OPTIONS)


def recorded(rank: int) -> tuple[list[Span], Counter[str], Counter[str]]:
    """The spans of a step, and the exchanges and kernel calls that were counted in it."""
    engine = make_engine(MIX.rank_sets)
    engine.observer.timeline.start(4, torch.device("cpu"))
    attend(engine, MIX, rank)
    counters = engine.counters
    exchanges, kernels = Counter(counters.exchanges), Counter(counters.kernel_calls)
    spans = engine.observer.timeline.stop()
    attend(engine, MIX, rank)
    assert engine.observer.timeline.stop() == []  # off again
    return spans, exchanges, kernels


def test_every_exchange_and_every_kernel_has_a_span() -> None:
    for spans, exchanges, kernels in run_threads(recorded, 3):
        by_category = Counter(span.category for span in spans)
        assert by_category["exchange"] == by_category["wait"] == sum(exchanges.values())
        assert by_category["compute"] == sum(kernels.values())
        assert {span.site for span in spans} == {"forward, layer 0", "backward, layer 0"}
        kinds = Counter(span.name.split(",")[0] for span in spans if span.category == "exchange")
        assert kinds == exchanges
        assert all(span.begin_ns <= span.end_ns for span in spans)
        for wait, exchange in zip(*(of(spans, name) for name in ("wait", "exchange")), strict=True):
            assert wait.name == exchange.name
            assert exchange.begin_ns <= wait.begin_ns <= wait.end_ns <= exchange.end_ns


def of(spans: list[Span], category: str) -> list[Span]:
    return [span for span in spans if span.category == category]


def test_whole_sequences_are_computed_while_an_exchange_is_in_flight() -> None:
    spans, *_ = run_threads(recorded, 3)[2]
    pack = next(span for span in spans if span.name == "1 whole sequences")
    first = of(spans, "exchange")[0]
    assert first.begin_ns <= pack.begin_ns and pack.end_ns <= of(spans, "wait")[0].begin_ns


def write_on_process(rank: int, folder: str) -> str:
    spans, *_ = recorded(rank)
    return write_trace(Agreement(timedelta(seconds=30)), spans, 4, folder)


def test_all_ranks_are_in_one_file(tmp_path: Path) -> None:
    paths = run_distributed(write_on_process, 3, str(tmp_path))
    assert set(paths) == {str(tmp_path / "trace-step-4.json")}
    events = json.loads(Path(paths[0]).read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    timed = [e for e in events if e["ph"] != "M"]
    assert min(e["ts"] for e in timed) == 0
    for rank in range(3):
        mine = [e for e in timed if e["pid"] == rank]
        assert {e["cat"] for e in mine} == {"compute", "exchange", "wait"}
        begun, ended = ({e["id"]: e["ts"] for e in mine if e["ph"] == phase} for phase in "be")
        assert begun.keys() == ended.keys() and all(begun[i] <= ended[i] for i in begun)
        alone = sorted((e["ts"], e["ts"] + e["dur"]) for e in mine if e["ph"] == "X")
        # computing and waiting never overlap on one track
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(alone))


def test_nothing_recorded_is_an_empty_trace() -> None:
    assert chrome_trace([[], []])["traceEvents"][1]["pid"] == 1


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_are_numbered_the_same_forward_and_backward(checkpointed: bool) -> None:
    mix = Mix(1, (9,), (whole(0),))
    engine = CoalescedAttentionEngine()
    engine.install(mix.schedule(0))
    engine.observer.timeline.start(0, torch.device("cpu"))
    q = mix.local(0)[0].requires_grad_()
    out = q
    for _ in range(3):
        out = layer(engine, out, checkpointed)
    out.sum().backward()
    sites = [span.site for span in engine.observer.timeline.stop()]
    forward = [f"forward, layer {i}" for i in range(3)]
    again = ["recomputation", "backward"] if checkpointed else ["backward"]
    assert sites == forward + [f"{phase}, layer {i}" for i in (2, 1, 0) for phase in again]


def layer(engine: CoalescedAttentionEngine, x: Tensor, checkpointed: bool) -> Tensor:
    def attention(y: Tensor) -> Tensor:
        return engine(y, y, y)

    return checkpoint(attention, x, engine=engine) if checkpointed else attention(x)
