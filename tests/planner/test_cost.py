"""Memory model against Table II, and the profile file against damage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from tests.planner.toys import BUCKETS, GEOMETRY, HEADS, MEMORY, table, whole_us
from zellige_lightning.errors import ConfigError, ProfileError
from zellige_lightning.placement.plan import WHOLE, ParallelConfig, PlacementOption, whole
from zellige_lightning.placement.sequence import Bucket
from zellige_lightning.placement.topology import Topology
from zellige_lightning.planner.calibration import Calibration, Terms
from zellige_lightning.planner.cost import MIB, ModelGeometry, ProfileTable
from zellige_lightning.planner.options import legal_configs

L = 24_000
KV = GEOMETRY.kv_bytes_per_token


@pytest.mark.parametrize(
    ("config", "resident", "buffer"),
    [
        (ParallelConfig(1, 1, 1), L * KV, 0),
        (ParallelConfig(4, 1, 1), L * KV, L * KV * 3 // 4),  # all-gather: replicated, three quarters received
        (
            ParallelConfig(1, 4, 1),
            L * KV // 4,
            L * KV // 4 * 7 // 2,
        ),  # Ulysses: packed q, k, v both ways, and o
        (ParallelConfig(1, 1, 4), L * KV // 4, 2 * L * KV // 4),  # ring: one block out, one in
        (ParallelConfig(2, 2, 1), L * KV // 2, L * KV // 4 + L * KV // 4 * 7 // 2),
        (ParallelConfig(1, 2, 2), L * KV // 4, 2 * L * KV // 4 + L * KV // 4 * 7 // 2),
    ],
)
def test_kv_payloads_are_those_of_table_2(config: ParallelConfig, resident: int, buffer: int) -> None:
    assert MEMORY.kv_bytes(L, config) == resident
    assert MEMORY.buffer_bytes(L, config) == buffer
    act = L // config.degree * 100_000 + 1_000
    assert MEMORY.act_bytes(L, config) == act
    assert MEMORY.memory_mib(L, config) == -(-(act + resident + buffer) // MIB)


@settings(deadline=None)
@given(st.integers(1, 5000), st.sampled_from(legal_configs(HEADS, 8)))
def test_memory_grows_with_tokens_and_covers_the_largest_shard(tokens: int, config: ParallelConfig) -> None:
    assert MEMORY.memory_mib(tokens, config) <= MEMORY.memory_mib(tokens + 1, config)
    assert MEMORY.act_bytes(tokens, config) * config.degree >= tokens * 100_000


def test_geometry_refuses_nonsense() -> None:
    with pytest.raises(ConfigError, match="num_heads"):
        ModelGeometry(1, 0, 1, 1, 1, 1, 1)


def test_measured_prices_are_returned_and_missing_ones_are_no_option() -> None:
    prices = table(4)
    assert prices.price_us(BUCKETS["v480"], WHOLE, "node") == whole_us(BUCKETS["v480"].num_tokens)
    assert prices.price_us(BUCKETS["v480"], WHOLE, "4+4") is None
    assert prices.whole_us(BUCKETS["v480"]) == whole_us(BUCKETS["v480"].num_tokens)


def test_adhoc_buckets_are_interpolated() -> None:
    prices = table(4)
    between = Bucket("adhoc", (20, 45, 80))
    price = prices.price_us(between, WHOLE, "node")
    assert price == pytest.approx(whole_us(between.num_tokens), rel=0.02)
    assert prices.price_us(between, ParallelConfig(1, 4, 1), "node") < price
    assert prices.is_adhoc(
        Bucket("v480", (1, 2, 3))
    )  # a known name with another shape is not the known bucket


def test_a_lone_bucket_is_interpolated_in_proportion() -> None:
    prices = table(2, {"i720": BUCKETS["i720"]})
    double = Bucket("adhoc", (2, 45, 80))
    assert prices.whole_us(double) == 2 * prices.whole_us(BUCKETS["i720"])


def test_extrapolated_wholes_are_for_the_cut_alone() -> None:
    prices = {("v720", ParallelConfig(1, 2, 1), "node"): 600}
    only_split = ProfileTable((BUCKETS["v720"],), prices, {"v720": 1100}, 0, {})
    assert only_split.whole_us(BUCKETS["v720"]) == 1100
    assert only_split.price_us(BUCKETS["v720"], WHOLE, "node") is None
    with pytest.raises(ProfileError, match="whole-sequence price"):
        only_split.whole_us(Bucket("adhoc", (1, 2, 3)))


def test_round_trip_and_version(tmp_path: Path) -> None:
    prices = table(4)
    path = tmp_path / "deep" / "profile.json"
    prices.save(path)
    loaded = ProfileTable.load(path, prices.fingerprint)
    assert loaded == prices
    assert loaded.version == prices.version
    assert [p.name for p in path.parent.iterdir()] == ["profile.json"]
    assert table(4, fixed_us=501).version != prices.version
    started = replace(prices, start_us={(ParallelConfig(1, 2, 1), "node"): 900})
    assert started.version != prices.version and ProfileTable.from_json(started.to_json()) == started


def test_what_exchanges_take_alone_is_known_from_corrected_prices() -> None:
    raw, pair = replace(table(2), start_us={(ParallelConfig(1, 2, 1), "node"): 900}), (0, 1)
    corrected = Calibration("overheads", Terms(700.0, 1.02, 1.1, 0.2), {}).applied_to(raw)
    assert corrected.start_us == {(ParallelConfig(1, 2, 1), "node"): 180}
    assert ProfileTable.from_json(corrected.to_json()) == corrected
    for bucket in BUCKETS.values():
        option = PlacementOption(ParallelConfig(2, 1, 1), pair)
        alone = raw.overhead_us(bucket, option, Topology.uniform(2))
        assert (
            alone == raw.prices_us[bucket.name, option.config, "node"] - whole_us(bucket.num_tokens) / 2 > 0
        )
        assert corrected.overhead_us(bucket, option, Topology.uniform(2)) == pytest.approx(alone, abs=6)


def test_starts_count_once_for_each_block() -> None:
    ulysses, gather = ParallelConfig(1, 2, 1), ParallelConfig(2, 1, 1)
    prices = replace(table(4), start_us={(ulysses, "node"): 900})
    options = [PlacementOption(ulysses, (0, 1))] * 3 + [PlacementOption(ulysses, (1, 2)), whole(3)]
    options += [PlacementOption(gather, (0, 1))] * 2
    assert prices.start_loads_us(options, Topology.uniform(4)) == [900, 1800, 900, 0]
    assert table(4).start_loads_us(options, Topology.uniform(4)) == [0, 0, 0, 0]


def test_a_foreign_fingerprint_names_the_keys(tmp_path: Path) -> None:
    table(4).save(tmp_path / "p.json")
    with pytest.raises(ProfileError) as caught:
        ProfileTable.load(tmp_path / "p.json", {"model": "toy", "world": 8, "device": "gpu"})
    assert "world: 4 in the file, 8 here" in str(caught.value)
    assert "device: None in the file" in str(caught.value)
    assert "model" not in caught.value.message


def _tampered(path: str, value: object) -> str:
    data = json.loads(table(2).to_json())
    *parents, last = path.split(".")
    place = data
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    place[int(last) if isinstance(place, list) else last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("prices_us.0.3", -1),
        ("prices_us.0.3", 0),
        ("prices_us.0.3", float("nan")),
        ("prices_us.0.3", float("inf")),
        ("prices_us.0.3", 1.5),
        ("prices_us.0.3", True),
        ("prices_us.0.3", 1 << 60),
        ("prices_us.0.3", None),
        ("prices_us.0.0", "unheard-of"),
        ("prices_us.0.0", 7),
        ("prices_us.0.1", [1, 0, 1]),
        ("prices_us.0.1", [1, 2]),
        ("prices_us.0", []),
        ("prices_us", {}),
        ("prices_us", []),
        ("fixed_us", "1"),
        ("fixed_us", -1),
        ("buckets", []),
        ("buckets.0", ["i256", [1, 2]]),
        ("buckets.1", ["i256", [1, 2, 3]]),
        ("extrapolated_us", {"unheard-of": 3}),
        ("start_us", None),
        ("start_us", [[[1, 2, 1], "node", -1]]),
        ("start_us", [[[1, 2, 1], "node", 0.5]]),
        ("start_us", [[[1, 2, 1], 3, 5]]),
        ("start_us", [[[1, 2, 1], "node", 5], [[1, 2, 1], "node", 5]]),
        ("start_us", [[[1, 1, 1], "node", 5]]),
        ("start_us", [[[2, 1, 1], "node", 5]]),
        ("start_us", [[[1, 2, 2], "node", 5]]),
        ("split_scale", 0),
        ("split_scale", float("nan")),
        ("split_scale", "1"),
        ("overhead_scale", 1e3),
        ("overhead_scale", True),
        ("overhead_scale", None),
        ("fingerprint", {"a": [1]}),
        ("fingerprint", None),
        ("format", "other"),
        ("surprise", 1),
    ],
)
def test_tampered_profiles_are_refused(path: str, value: object) -> None:
    with pytest.raises(ProfileError):
        ProfileTable.from_json(_tampered(path, value))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, '{"format": "zellige-profile-3"}'])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(ProfileError):
        ProfileTable.from_json(text)


def test_two_prices_for_one_option_are_refused() -> None:
    data = json.loads(table(2).to_json())
    data["prices_us"].append(data["prices_us"][0])
    with pytest.raises(ProfileError, match="two prices"):
        ProfileTable.from_json(json.dumps(data))


def test_missing_large_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read"):
        ProfileTable.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match="cannot be read"):
        ProfileTable.load(tmp_path / "binary.json")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ProfileError, match="larger"):
        ProfileTable.load(tmp_path / "large.json")


def test_an_unwritable_path_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot be written"):
        table(2).save(tmp_path / "file" / "profile.json")
