"""Sampling: solvers reach what the velocity points to, and a split sample is the whole one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from torch import Tensor, nn

from tests.distributed import run_distributed
from tests.lightning.toy import make_trainer, model_prices
from tests.recipes.packing import block_diagonal
from zellige_lightning.average import WeightAverage
from zellige_lightning.batch import local_batch
from zellige_lightning.datamodule import ZelligeDataModule
from zellige_lightning.errors import ConfigError
from zellige_lightning.placement import Bucket, GlobalBatch
from zellige_lightning.recipes.wan21.codec import DctCodec
from zellige_lightning.recipes.wan21.flow import FlowMatching
from zellige_lightning.recipes.wan21.module import WanModule
from zellige_lightning.recipes.wan21.patchify import unpatchify
from zellige_lightning.recipes.wan21.sample_media import SampleMedia
from zellige_lightning.recipes.wan21.sampler import SamplerSettings, sample_batch
from zellige_lightning.sources import FieldSpec, Sample, SyntheticSource
from zellige_lightning.strategy import ZelligeStrategy

FIELDS = {"latents": FieldSpec((64,), torch.float32)}, {"text": FieldSpec((16, 64), torch.float32)}
SAMPLES = [Sample("photo", (1, 4, 4)), Sample("clip", (5, 4, 6)), Sample("second", (1, 2, 4))]
FLOW = FlowMatching(bucket_shifts={"video-5x4x6": 5.0})


class Held(SyntheticSource):
    """Random samples that were encoded by the demo's codec, as they say."""

    settings = DctCodec().settings

    def __init__(self) -> None:
        super().__init__(*FIELDS, SAMPLES)

    def caption(self, key: str) -> str:
        return f"a {key}"


class Data(LightningDataModule):
    def train_dataloader(self) -> Held:
        return Held()

    val_dataloader = train_dataloader


def data() -> ZelligeDataModule:
    return ZelligeDataModule(Data(), tokens_per_batch=200, plan_evaluation=True)


class Oracle(nn.Module):
    """Knows the sample: its velocity leads straight to it."""

    def __init__(self, x0: Tensor) -> None:
        super().__init__()
        self.x0 = nn.Parameter(x0)

    def forward(
        self, x: Tensor, positions: Tensor, ids: Tensor, t: Tensor, text: Tensor, n: list[int]
    ) -> Tensor:
        return (x - self.x0) / (t[ids, None] / 1000.0) * (1.0 if text.any() else 3.0)


BATCH = GlobalBatch.of(
    0, 0, [("photo", Bucket("image", (1, 3, 4))), ("clip", Bucket("video-5x4x6", (5, 4, 6)))]
)


@pytest.mark.parametrize("solver", ["euler", "unipc"])
@pytest.mark.parametrize("steps", [1, 7])
def test_solvers_follow_the_velocity_to_the_sample(solver: str, steps: int) -> None:
    batch = local_batch(BATCH, SyntheticSource(*FIELDS))
    x0 = torch.randn(132, 64, generator=torch.Generator().manual_seed(0))
    got = sample_batch(Oracle(x0), FLOW, batch, SamplerSettings(solver, steps))  # type: ignore[arg-type]
    # The times of UniPC are whole numbers of 1000.
    torch.testing.assert_close(got, x0, rtol=0, atol=1e-4 if solver == "euler" else 0.05)


def test_guidance_leads_away_from_what_comes_without_the_caption() -> None:
    batch = local_batch(BATCH, SyntheticSource(*FIELDS))
    x0 = torch.randn(132, 64, generator=torch.Generator().manual_seed(0))
    got = sample_batch(Oracle(x0), FLOW, batch, SamplerSettings("euler", 1, 2.0))  # type: ignore[arg-type]
    noise = torch.cat([FLOW.noise(0, s, range(s.num_tokens)) for s in batch.sequences])
    # Without caption 3v, so 3v + 2 (v - 3v) = -v.
    torch.testing.assert_close(got, noise + (noise - x0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("settings", "says"), [(("heun", 3), "unipc, euler"), (("unipc", 0), "one step")])
def test_impossible_samplers_are_refused(settings: tuple[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SamplerSettings(*settings)


def trained_module() -> WanModule:
    seed_everything(0, workers=True, verbose=False)
    module = WanModule("tiny", FLOW, lr=1e-2, warmup_steps=0)
    nn.init.normal_(module.model.head.head.weight, std=0.1)
    return module


def fit(rank: int, folder: str) -> dict[str, Any]:
    """Two steps with a validation after each; what was drawn, and what was split while drawing."""
    model_prices()
    drawn: list[dict[str, Tensor]] = []
    media = SampleMedia("demo", num_images=1, num_videos=1, steps=3, guidance=2.0)
    write = media._write

    def keep(path: Path, mine: Any, samples: dict[str, Tensor], *rest: Any) -> None:
        drawn.append({key: x.clone() for key, x in samples.items()})
        write(path, mine, samples, *rest)

    media._write = keep  # type: ignore[method-assign]
    trainer = make_trainer(
        ZelligeStrategy(planner={"memory_cap_gib": 1.0}),
        max_steps=2, max_epochs=-1, limit_val_batches=None, val_check_interval=1, default_root_dir=folder,
        callbacks=[WeightAverage(decay=0.5), media],
    )  # fmt: skip
    module = trained_module()
    trainer.fit(module, data())
    losses = {name: float(value) for name, value in trainer.callback_metrics.items() if "val" in name}
    state = {name: p.detach().numpy() for name, p in module.model.named_parameters()}
    return {
        "drawn": [{k: x.numpy() for k, x in d.items()} for d in drawn],
        "losses": losses,
        "average": state,
    }


def test_a_fit_draws_the_same_samples_split_or_whole(tmp_path: Path) -> None:
    (alone,) = run_distributed(fit, 1, str(tmp_path / "one"), group=False)
    both = run_distributed(fit, 2, str(tmp_path / "two"), group=False)
    for found in both:
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        for mine, expected in zip(found["drawn"], alone["drawn"], strict=True):
            assert set(mine) == {"photo", "clip"}
            for key, x in mine.items():
                torch.testing.assert_close(
                    torch.from_numpy(x), torch.from_numpy(expected[key]), rtol=0, atol=1e-3
                )
    # After the fit the module holds the averaged weights: what was drawn last came from them.
    module = trained_module()
    module.model.load_state_dict({n: torch.from_numpy(p) for n, p in alone["average"].items()})
    batch = local_batch(GlobalBatch.of(0, 0, [("clip", Bucket("video-5x4x6", (5, 4, 6)))]), Held())
    with block_diagonal(module, batch.lengths):
        again = sample_batch(module.model, FLOW.for_evaluation(1), batch, SamplerSettings("unipc", 3, 2.0))
    torch.testing.assert_close(torch.from_numpy(alone["drawn"][-1]["clip"]), again, rtol=0, atol=1e-3)
    for world in ("one", "two"):
        folder = tmp_path / world / "samples" / "step-0000002"
        names = [path.name for path in sorted(folder.iterdir())]
        assert names == ["00-image-1x4x4.png", "01-video-5x4x6.mp4", "samples.json"]
        rows = json.loads((folder / "samples.json").read_text())
        assert [row["caption"] for row in rows] == ["a photo", "a clip"]
    pixels = DctCodec().decode(unpatchify(torch.from_numpy(alone["drawn"][-1]["photo"]), (1, 4, 4)))
    from PIL import Image

    with Image.open(tmp_path / "one" / "samples" / "step-0000002" / "00-image-1x4x4.png") as image:
        assert image.size == (64, 64)
        assert image.getpixel((3, 5)) == pytest.approx([255 * float(v) for v in pixels[:, 0, 5, 3]], abs=1.0)
