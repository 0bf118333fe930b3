"""The event simulation on programs that can be followed by hand."""

from __future__ import annotations

import pytest

from zellige_lightning.simulator.events import Compute, Start, Wait, run


def test_an_exchange_waits_for_the_late_rank_and_then_for_the_wire() -> None:
    early = [Compute(1.0), Start("x", 0.5, (1,)), Wait("x")]
    late = [Compute(3.0), Start("x", 0.5, (0,)), Wait("x")]
    clocks = run({0: early, 1: late})
    assert (clocks[0].now, clocks[0].computing, clocks[0].waiting, clocks[0].exposed) == (3.5, 1.0, 2.0, 0.5)
    assert (clocks[1].now, clocks[1].computing, clocks[1].waiting, clocks[1].exposed) == (3.5, 3.0, 0.0, 0.5)


def test_work_behind_an_exchange_hides_it() -> None:
    hidden = [Start("x", 2.0, (1,)), Compute(3.0), Wait("x")]
    clocks = run({0: hidden, 1: [Start("x", 2.0, (0,)), Compute(0.5), Wait("x")]})
    assert (clocks[0].now, clocks[0].exposed) == (3.0, 0.0)
    assert (clocks[1].now, clocks[1].exposed) == (2.0, 1.5)


def test_a_chain_of_pairs_carries_a_delay() -> None:
    """0 is late for 1, who is therefore late for 2."""
    programs = {
        0: [Compute(5.0), Start("a", 1.0, (1,)), Wait("a")],
        1: [Start("a", 1.0, (0,)), Wait("a"), Start("b", 1.0, (2,)), Wait("b")],
        2: [Start("b", 1.0, (1,)), Wait("b")],
    }
    clocks = run(programs)
    assert [clocks[r].now for r in range(3)] == [6.0, 7.0, 7.0]
    assert clocks[2].waiting == 6.0


def test_different_orders_are_found_out() -> None:
    one = [Start("a", 1.0, (1,)), Wait("a"), Start("b", 1.0, (1,)), Wait("b")]
    other = [Start("b", 1.0, (0,)), Wait("b"), Start("a", 1.0, (0,)), Wait("a")]
    with pytest.raises(RuntimeError, match="wait for each other"):
        run({0: one, 1: other})
