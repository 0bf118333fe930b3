"""A sheet of pictures from a trained model, beside real samples."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from torch import Tensor

from zellige_lightning.batch import local_batch
from zellige_lightning.placement import Catalog, GlobalBatch, Sequence
from zellige_lightning.recipes.wan21.codec import LatentCodec
from zellige_lightning.recipes.wan21.flow import FlowMatching
from zellige_lightning.recipes.wan21.model import WanModel
from zellige_lightning.recipes.wan21.patchify import unpatchify
from zellige_lightning.recipes.wan21.sampler import SamplerSettings, sample_batch
from zellige_lightning.recipes.wan21.store import LatentStore

_TILE = 128  # pixels of the longer side of a tile in the picture


def save_samples(
    path: Path,
    model: WanModel,
    flow: FlowMatching,
    codec: LatentCodec,
    store: LatentStore,
    catalog: Catalog,
    *,
    pictures: int = 4,
    steps: int = 30,
    seed: int = 0,
) -> None:
    """One PNG: real pictures, below them those made from their captions; then the same for a clip.

    Args:
        store, catalog: the largest sample of each medium is shown, of a clip `pictures` of its frames.
        pictures: in a row.
        seed: of the noise, which is not that of training.
    """
    flow = flow.for_evaluation(seed)
    images, clips = _largest(store, catalog)
    device = next(model.parameters()).device

    def pair(sequence: Sequence) -> tuple[Tensor, Tensor]:
        real = store.read_tokens(sequence, range(sequence.num_tokens))["latents"].float()
        alone = local_batch(GlobalBatch.of(0, 0, [(sequence.key, sequence.bucket)]), store).to(device)
        made = sample_batch(model, flow, alone, SamplerSettings(steps=steps)).cpu()
        real_pixels, made_pixels = (codec.decode(unpatchify(x, sequence.bucket.grid)) for x in (real, made))
        return real_pixels, made_pixels

    shown = [pair(sequence) for sequence in images[:pictures]]
    rows = [[_tile(two[i], 0) for two in shown] for i in (0, 1)]
    for two in [pair(sequence) for sequence in clips[:1]]:
        frames = [i * (two[0].shape[1] - 1) // max(1, pictures - 1) for i in range(pictures)]
        rows += [[_tile(clip, frame) for frame in frames] for clip in two]
    _sheet(rows).save(path)


def _largest(store: LatentStore, catalog: Catalog) -> tuple[list[Sequence], list[Sequence]]:
    """Images and clips, one of each medium: the key of a demo sample names its medium."""
    chosen: dict[tuple[bool, str], Sequence] = {}
    for sample in store.samples:
        sequence = Sequence(0, sample.key, catalog.bucket_for(sample.grid))
        medium = sequence.bucket.is_video, sample.key.rpartition("/")[0]
        if medium not in chosen or sequence.num_tokens > chosen[medium].num_tokens:
            chosen[medium] = sequence
    images, clips = ([s for (video, _), s in chosen.items() if video is kind] for kind in (False, True))
    return images, clips


def _tile(pictures: Tensor, frame: int) -> Image.Image:
    """One frame of `[3, F, H, W]` in [0, 1]."""
    image = Image.fromarray((pictures[:, frame] * 255).byte().permute(1, 2, 0).numpy())
    image.thumbnail((_TILE, _TILE))
    return image


def _sheet(rows: list[list[Image.Image]]) -> Image.Image:
    step = _TILE + 4
    sheet = Image.new("RGB", (max(map(len, rows)) * step, len(rows) * step), "white")
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            sheet.paste(image, (x * step, y * step))
    return sheet
