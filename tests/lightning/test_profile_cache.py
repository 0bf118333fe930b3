"""A profile file that does not belong to a job, is damaged, or is written by two jobs at once."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.toy import Toy
from tests.planner.toys import BUCKETS, table
from zellige_lightning.agreement import Agreement
from zellige_lightning.placement import Topology
from zellige_lightning.planner import ProfileTable, legal_configs
from zellige_lightning.profile_cache import fingerprint_of, load_or_measure

FINGERPRINT = {"model": "toy", "world": 2}
OTHER = {"model": "toy", "world": 2, "torch": "0.0"}


def load(path: Path, fingerprint: Any = FINGERPRINT) -> tuple[ProfileTable, list[str], int]:
    """The table, what was said, and how often it was measured."""
    said: list[str] = []
    measured: list[int] = []

    def measure() -> ProfileTable:
        measured.append(1)
        return ProfileTable.from_json(
            json.dumps({**json.loads(table(2, fixed_us=777).to_json()), "fingerprint": dict(fingerprint)})
        )

    found = load_or_measure(Agreement(timedelta(seconds=5)), path, fingerprint, measure, said.append)
    return found, said, len(measured)


def good() -> dict[str, Any]:
    return json.loads(table(2).to_json())


DAMAGE: dict[str, Any] = {
    "truncated": lambda: json.dumps(good())[:-40],
    "empty": lambda: "",
    "not JSON": lambda: "cos\nsystem\n(S'touch hostile'\ntR.",
    "a list": lambda: "[]",
    "deep": lambda: "[" * 200_000,
    "an endless integer": lambda: json.dumps(good()).replace(": 500", ": " + "9" * 5000),
    "not a number": lambda: json.dumps({**good(), "fixed_us": float("nan")}),
    "infinite": lambda: json.dumps({**good(), "fixed_us": float("inf")}),
    "negative": lambda: json.dumps({**good(), "fixed_us": -1}),
    "negative spread": lambda: json.dumps({**good(), "spread_us": [[*good()["prices_us"][0][:3], -1]]}),
    "spread of nothing": lambda: json.dumps({**good(), "spread_us": [["x", [1, 1, 1], "node", 1]]}),
    "interpolated nothing": lambda: json.dumps({**good(), "interpolated": [["x", [1, 1, 1], "node"]]}),
    "half a split": lambda: json.dumps({**good(), "interpolated": [["i256", [1.0, 1, 1], "node"]]}),
    "an older format": lambda: json.dumps({**good(), "format": "zellige-profile-1"}),
    "infinite fingerprint": lambda: json.dumps(good()).replace('"toy"', "1e999"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_refused_with_a_reason_and_measured_anew(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(DAMAGE[damage](), encoding="utf-8")
    found, said, measured = load(path)
    assert measured == 1 and found.fixed_us == 777
    assert "is not used, it is measured anew" in said[0] and len(said[0]) > 60
    assert load(path)[1:] == (["profile loaded from p.json"], 0)
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]


def test_too_large_and_binary_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\x80\x04\x95\xff")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate((16 << 20) + 1)
    for name in ("binary.json", "large.json"):
        assert load(tmp_path / name)[2] == 1


def test_another_version_of_anything_makes_a_profile_stale(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    load(path, OTHER)
    _, said, measured = load(path, {**OTHER, "torch": "9.9"})
    assert measured == 1
    assert "torch: '0.0' in the file, '9.9' here" in said[0]


def test_a_fingerprint_names_all_that_prices_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    buckets, configs = tuple(BUCKETS.values()), legal_configs(4, 2)

    def fingerprint(**changed: Any) -> dict[str, Any]:
        given: dict[str, Any] = {
            "module": Toy(),
            "buckets": buckets,
            "configs": configs,
            "topology": Topology.uniform(2),
            "precision": "32",
            "engine": "save_attention=none, checkpointing=False",
            "device": torch.device("cpu"),
        }
        return fingerprint_of(**{**given, **changed})

    known = fingerprint()
    assert fingerprint() == known

    def differs(other: dict[str, Any]) -> set[str]:
        return {key for key in other if other[key] != known.get(key)}

    assert differs(fingerprint(precision="bf16-mixed")) == {"precision"}
    assert differs(fingerprint(engine="save_attention=none, checkpointing=True")) == {"engine"}
    assert differs(fingerprint(topology=Topology.uniform(4))) == {"world_size", "topology"}
    assert differs(fingerprint(buckets=buckets[:2])) == {"buckets"}
    assert differs(fingerprint(configs=configs[:2])) == {"configs"}
    assert differs(fingerprint(module=Toy().double())) == {"model"}
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert differs(fingerprint()) == {"torch"}
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Other GPU")
    assert fingerprint(device=torch.device("cuda", 0))["device"] == "Other GPU"


def test_two_jobs_at_once_do_not_destroy_each_others_file(tmp_path: Path) -> None:
    path, failures = tmp_path / "p.json", []
    tables = [table(2, fixed_us=us) for us in (1, 2)]
    tables[0].save(path)

    def write(mine: ProfileTable) -> None:
        for _ in range(40):
            mine.save(path)

    def read() -> None:
        for _ in range(80):
            try:
                assert ProfileTable.load(path).fixed_us in (1, 2)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=write, args=(mine,)) for mine in tables]
    threads.append(threading.Thread(target=read))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
