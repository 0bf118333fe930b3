"""`python -m zellige_lightning.planner`: output lines, exit status, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zellige_lightning.planner.__main__ import main

OPTION = {"config": [1, 1, 1], "time": 5, "memory": 2, "rank_sets": "all"}
PAIR = {"config": [1, 2, 1], "time": 3, "memory": 1, "rank_sets": [[0, 1]]}


def problem(**changes: Any) -> dict[str, Any]:
    option = OPTION | {k: v for k, v in changes.items() if k in OPTION}
    base = {
        "name": "p",
        "ranks": 2,
        "cap": 9,
        "sequences": [{"id": "a", "count": 3, "options": [option, PAIR]}],
    }
    return base | {k: v for k, v in changes.items() if k not in OPTION}


def write(tmp_path: Path, data: Any) -> str:
    path = tmp_path / "problems.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return str(path)


@pytest.mark.parametrize("name", ["exact", "paper", "joint"])
def test_every_planner_prints_a_checked_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path, [problem()]), "--planner", name]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["name"], row["planner"], row["makespan"], row["splits"]) == ("p", name, 8, 1)
    assert row["faults"] == []
    assert row["ms"] > 0
    assert sum(p["count"] for p in row["placements"]) == 3


def test_what_does_not_fit_fails_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = [problem(cap=1, sequences=[{"id": "a", "count": 1, "options": [OPTION]}]), problem(cap=2)]
    assert main([write(tmp_path, problems)]) == 0
    nothing, crowded = map(json.loads, capsys.readouterr().out.splitlines())
    assert nothing["status"] == crowded["status"] == "failed"
    assert "a fits no option under the cap of 1" in nothing["reason"]
    assert "3 x a" in crowded["reason"]


@pytest.mark.parametrize(
    "changes",
    [
        {"time": 0},
        {"time": -3},
        {"time": 2.5},
        {"time": float("nan")},
        {"memory": -1},
        {"config": [1, 1]},
        {"config": [3, 1, 1]},
        {"rank_sets": "diagonal"},
        {"rank_sets": []},
        {"rank_sets": [[0, 1]]},
        {"rank_sets": [[5]]},
        {"ranks": 0},
        {"cap": None},
        {"sequences": [{"id": "a", "count": 1}]},
        {"sequences": 3},
    ],
)
def test_bad_problems_are_refused_by_name(
    changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path, [problem(**changes)])]) == 2
    assert "problem 'p'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "3", '["x"]'])
def test_what_is_no_list_of_problems_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([write(tmp_path, text)]) == 2
    assert capsys.readouterr().err


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
