"""`zellige-plan` as a user runs it: without torch and lightning, quickly, and with bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zellige_lightning.plan_cli import main
from zellige_lightning.planner.cost import ProfileTable
from zellige_lightning.simulator.cluster import load_cluster
from zellige_lightning.simulator.constants import WAN_1_3B, image, video
from zellige_lightning.simulator.prices import modeled_table

WITHOUT_TORCH = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "lightning", "pytorch_lightning", "lightning_fabric"):
            raise ModuleNotFoundError(f"{name} is not installed")
sys.meta_path.insert(0, Absent())
from zellige_lightning.plan_cli import main
sys.exit(main(sys.argv[1:]))
"""

HELP_ALONE = """
from zellige_lightning.plan_cli import main
try:
    main()
except SystemExit:
    print(sorted({"torch", "lightning", "numpy", "ortools", "matplotlib", "yaml"} & set(sys.modules)))
"""


def run_alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=120, check=False)


def test_runs_where_torch_and_lightning_are_not_installed(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = run_alone("--json", str(file))
    assert done.returncode == 0, done.stderr
    assert "3 x video-720p-10s, 228 x image-720p (1,263,600 tokens) on 4 ranks of a800" in done.stdout
    assert "fastest: exact" in done.stdout and "KnapFormer's best layout" in done.stdout
    data = json.loads(file.read_text())
    assert data["source"] == "modeled"
    assert {row["policy"] for row in data["policies"]} >= {
        "exact",
        "paper",
        "naive",
        "usp",
        "knapformer",
        "disjoint",
    }
    sampler = data["adaptive_load_sampler"]
    assert 1.0 < sampler["exponent"] < 2.0
    assert sampler["batch_sizes"]["video-720p-10s"] == 1 < sampler["batch_sizes"]["image-720p"]
    assert data["constants"]["split_launch_us"][1].startswith("free constant")


def test_help_loads_no_solver() -> None:
    """What makes it start quickly: everything heavy is imported once there is something to plan."""
    command = f"import sys\nsys.argv = ['zellige-plan', '--help']\n{HELP_ALONE}"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def data_of(tmp_path: Path, *arguments: str) -> dict[str, object]:
    file = tmp_path / "out.json"
    assert main([*arguments, "--json", str(file), "--policies", "exact,naive,usp"]) == 0
    found = json.loads(file.read_text())
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.json", '[{"bucket": "video_480p_10s"}, {"grid": [1, 45, 80], "count": 5}, "image_256p"]'),
        ("m.json", '{"video_480p_10s": 1, "image_720p": 5, "image_256p": 1}'),
        (
            "m.jsonl",
            '{"bucket": "video_480p_10s"}\n{"grid": "1x45x80", "count": 5}\n\n{"bucket": "image_256p"}\n',
        ),
        ("m.csv", "bucket,count\nvideo_480p_10s,1\nimage_720p,5\nimage_256p,\n"),
    ],
)
def test_manifests(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    data = data_of(tmp_path, "--manifest", str(tmp_path / name), "--ranks", "2")
    assert data["batch"] == {"video_480p_10s": 1, "image_720p": 5, "image_256p": 1}
    assert data["ranks"] == 2


def test_a_budget_scales_the_batch(tmp_path: Path) -> None:
    data = data_of(tmp_path, "--example", "fig2", "--ranks", "8", "--tokens-per-gpu", "315900")
    assert data["batch"] == {"video-720p-10s": 6, "image-720p": 456}


def test_a_measured_profile_gives_prices(tmp_path: Path) -> None:
    cluster = load_cluster("a800")
    table = modeled_table(cluster, WAN_1_3B, cluster.topology(2), [video("480p", 10), image("720p")])
    table.save(tmp_path / "profile.json")
    assert ProfileTable.load(tmp_path / "profile.json") == table
    arguments = ("--profile", str(tmp_path / "profile.json"), "--histogram", "video_480p_10s=1,image_720p=9")
    data = data_of(tmp_path, *arguments)
    assert data["source"] == "predicted from the measured profile"
    assert data["ranks"] == 2


def test_pictures(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    assert main(["--policies", "exact", "--picture", f"exact={path}"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--manifest", "MISSING.json"), "MISSING.json cannot be read"),
        (("--manifest", "BROKEN.json"), "BROKEN.json cannot be read"),
        (("--manifest", "BINARY.csv"), "BINARY.csv cannot be read"),
        (("--manifest", "BUCKET.jsonl"), "entry 2 of BUCKET.jsonl: unknown bucket 'video_9000p'"),
        (("--manifest", "COUNT.json"), "count = -3"),
        (("--manifest", "EMPTY.json"), "0 sequences"),
        (("--histogram", "video=3"), "unknown bucket 'video'"),
        (("--histogram", "image_720p"), "histogram entry 'image_720p'"),
        (("--histogram", "image_720p=0"), "0 sequences"),
        (("--tokens-per-gpu", "0"), "--tokens-per-gpu 0"),
        (("--tokens-per-gpu", "7"), "holds no sequence"),
        (("--cluster", "tpu"), "no cluster 'tpu'"),
        (("--ranks", "0"), "0 ranks on cluster"),
        (("--model", "flux"), "unknown model 'flux'"),
        (("--memory-cap-gib", "0"), "--memory-cap-gib 0"),
        (("--policies", "exact,magic"), "unknown policies ['magic']"),
        (("--policies", "knapformer", "--layout", "g3n1"), "covers 3 ranks"),
        (("--policies", "usp", "--layout", "g4n1"), "no USP factorization"),
        (("--picture", "exact"), "--picture exact"),
        (("--profile", "MISSING.json"), "MISSING.json cannot be read"),
        (("--profile", "BROKEN.json"), "not JSON"),
        (("--profile", "PROFILE.json", "--ranks", "8"), "measured on 2 ranks, not on 8"),
        (("--profile", "PROFILE.json", "--cluster", "RACK.yaml"), "other nodes than the cluster"),
        (("--catalog", "BROKEN.json"), "catalog BROKEN.json cannot be read"),
    ],
)
def test_bad_input_is_one_typed_line(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("BROKEN.json").write_text("{")
    Path("BINARY.csv").write_bytes(b"\xff\xfe\x00")
    Path("BUCKET.jsonl").write_text('{"bucket": "image_720p"}\n{"bucket": "video_9000p"}\n')
    Path("COUNT.json").write_text('[{"bucket": "image_720p", "count": -3}]')
    Path("EMPTY.json").write_text("[]")
    cluster = load_cluster("a800")
    modeled_table(cluster, WAN_1_3B, cluster.topology(2), [video("720p", 10), image("720p")]).save(
        "PROFILE.json"
    )
    lines = [f'{name}: [{getattr(cluster, name)}, "{why}"]' for name, why in cluster.sources.items()]
    Path("RACK.yaml").write_text(
        "\n".join(lines).replace("None", "null").replace("ranks_per_node: [8", "ranks_per_node: [1")
    )
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert "What to change" in printed.err
    assert printed.out == ""
