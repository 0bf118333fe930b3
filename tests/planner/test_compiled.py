"""When solvers are imported and compiled, and what happens where compiled code cannot be kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.planner.toys import batch, planner
from zellige_lightning.planner.compiled import HAS_NUMBA, as_list, buffer, compiled, zeros

MAKE = """
import sys
from tests.planner.toys import batch, planner
made = planner(4, name=sys.argv[1])
print("made", "numba" in sys.modules, "ortools" in sys.modules)
made.prepare()
print("prepared", "numba" in sys.modules, "ortools" in sys.modules)
print(made.plan(batch({"v480": 3, "i256": 40})).makespan_us)
"""


def run(code: str, *arguments: str, **environment: str) -> list[str]:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_ranks_that_never_plan_import_no_solver() -> None:
    made, prepared, makespan = run(MAKE, "exact")
    assert made == "made False False"
    assert prepared == f"prepared {HAS_NUMBA} False"
    assert int(makespan) == planner(4, name="exact").plan(batch({"v480": 3, "i256": 40})).makespan_us
    assert run(MAKE, "paper")[:2] == ["made False False", "prepared False True"]


def test_preparing_in_another_thread_changes_no_plan() -> None:
    made, what = planner(4, name="exact"), batch({"v480": 3, "i720": 9, "i256": 40})
    thread = threading.Thread(target=made.prepare)
    thread.start()
    digest = made.plan(what).digest
    thread.join()
    assert made.num_plans == 1
    assert planner(4, name="exact").plan(what).digest == digest


BROKEN = """
import errno
from numba.core import caching
def fail(*arguments, **named):
    raise OSError(errno.ENOSPC, "no space left on device")
caching.Cache.save_overload = fail
caching.Cache.load_overload = fail
from zellige_lightning.planner.search_kernel import weight
print(weight(3, 4, 2, 0), len(weight.signatures))
"""


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
def test_a_full_disk_costs_a_compilation_only(tmp_path: Path) -> None:
    assert run(BROKEN, NUMBA_CACHE_DIR=str(tmp_path)) == ["6 1"]


@pytest.mark.skipif(not HAS_NUMBA, reason="needs numba")
def test_without_any_cache_folder_kernels_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    numba = pytest.importorskip("numba")
    plain = numba.njit

    def refuse(*, nogil: bool, cache: bool = False) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return plain(nogil=nogil)

    monkeypatch.setattr(numba, "njit", refuse)

    def double(values: object) -> int:
        return 2 * len(values)  # type: ignore[arg-type]

    assert compiled(double)(buffer([1, 2, 3])) == 6


def test_buffers_and_lists() -> None:
    assert as_list(buffer(range(3))) == [0, 1, 2]
    assert as_list(zeros(2)) == [0, 0]
    assert all(type(x) is int for x in as_list(zeros(2)))
