"""Plans, errors, catalogs and topologies: round trips and refusals."""

from __future__ import annotations

import pickle

import pytest

from zellige_lightning import errors
from zellige_lightning.errors import ConfigError, DataError, PlanningError, ZelligeError, from_wire
from zellige_lightning.placement.plan import ParallelConfig, PlacementOption, Plan, rank_sums, whole
from zellige_lightning.placement.sequence import Bucket, Catalog, GlobalBatch, Sequence
from zellige_lightning.placement.topology import Topology

PAIR = PlacementOption(ParallelConfig(1, 2, 1), (0, 2))
PLAN = Plan(
    step=4,
    world_size=3,
    options=(PAIR, whole(1), whole(1)),
    loads_us=(10, 14, 10),
    memory_mib=(3, 4, 3),
    fixed_us=6,
    lower_bound_us=12,
    bound_source="area",
    anchors=(0,),
    planner="paper",
    statuses=("OPTIMAL",),
    solve_ms=1.5,
)


def test_plan_round_trip() -> None:
    again = Plan.from_json(PLAN.to_json())
    assert again == PLAN
    assert again.digest == PLAN.digest


def test_plan_figures() -> None:
    assert (PLAN.makespan_us, PLAN.predicted_us, PLAN.num_splits) == (14, 20, 1)
    assert PLAN.gap == pytest.approx(14 / 12 - 1)
    assert PLAN.imbalance == pytest.approx(14 / (34 / 3))
    assert PLAN.rank_sets == {(0, 2)}
    assert Plan(0, 2, (), (0, 0), (0, 0)).gap == 0.0
    assert Plan(0, 1, (whole(0),), (5,), (1,)).gap == float("inf")


def test_the_digest_sees_the_placement_and_not_the_clock() -> None:
    other = Plan.from_json(PLAN.to_json().replace('"solve_ms": 1.5', '"solve_ms": 9.0'))
    assert other.digest == PLAN.digest
    moved = Plan(4, 3, (PAIR, whole(1), whole(0)), (10, 14, 10), (3, 4, 3))
    assert moved.digest != PLAN.digest


def test_rank_sums_are_eq_6() -> None:
    assert rank_sums([PAIR, whole(2)], [5, 7], 4) == (5, 0, 12, 0)


@pytest.mark.parametrize("cls", [c for c in vars(errors).values() if isinstance(c, type)])
def test_errors_travel(cls: type) -> None:
    if not issubclass(cls, ZelligeError):
        return
    error = cls("what failed", fix="what to do", step=3, rank=1)
    for copy in (from_wire(error.to_wire()), pickle.loads(pickle.dumps(error))):
        assert type(copy) is cls
        assert (copy.message, copy.fix, copy.step, copy.rank) == ("what failed", "what to do", 3, 1)
        assert str(copy) == str(error) == "[step 3, rank 1] what failed\n  What to change: what to do"


def test_an_unknown_error_type_still_arrives() -> None:
    wire = {"type": "FutureError", "message": "m", "fix": None, "step": None, "rank": None}
    assert type(from_wire(wire)) is ZelligeError


def test_catalogs_find_refuse_and_make_buckets() -> None:
    image = Bucket("i", (1, 4, 4))
    assert Catalog((image,)).bucket_for((1, 4, 4)) is image
    assert Catalog((image,)).bucket_for((2, 4, 4)) == Bucket("adhoc-2x4x4", (2, 4, 4))
    with pytest.raises(DataError, match=r"\(2, 4, 4\)"):
        Catalog((image,), strict=True).bucket_for((2, 4, 4))
    for bad in ((), (image, Bucket("i", (2, 2, 2))), (image, Bucket("j", (1, 4, 4)))):
        with pytest.raises(ConfigError):
            Catalog(bad)
    with pytest.raises(ConfigError, match="grid"):
        Bucket("b", (1, 0, 4))


def test_batches_check_their_indices_and_window() -> None:
    image = Bucket("i", (1, 4, 4))
    one = Sequence(0, "a", image)
    assert GlobalBatch(0, 0, (one,), 1, 16).digest != GlobalBatch(1, 0, (one,), 1, 16).digest
    with pytest.raises(DataError, match="indices"):
        GlobalBatch(0, 0, (Sequence(1, "a", image),), 1, 16)
    with pytest.raises(DataError, match="window"):
        GlobalBatch(0, 0, (one, Sequence(1, "b", image)), 1, 32)


def test_topology_classes() -> None:
    nodes = Topology.uniform(8, 4)
    assert nodes.class_of((3,)) == nodes.class_of((0, 1, 3)) == "node"
    assert nodes.class_of((2, 3, 4)) == nodes.class_of((1, 4, 5)) == "2+1"
    assert nodes.num_nodes == 2
    with pytest.raises(ConfigError):
        Topology.uniform(0)


def test_planning_errors_are_zellige_errors() -> None:
    with pytest.raises(ZelligeError):
        raise PlanningError("no", fix="yes")
