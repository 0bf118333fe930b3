"""Pictures from a trained model: Euler steps along the learnt velocity, beside real samples."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from zellige_lightning.batch import positions_of
from zellige_lightning.placement import Catalog, Sequence
from zellige_lightning.recipes.wan21.codec import LatentCodec
from zellige_lightning.recipes.wan21.flow import FlowMatching
from zellige_lightning.recipes.wan21.model import WanModel
from zellige_lightning.recipes.wan21.patchify import unpatchify
from zellige_lightning.recipes.wan21.store import LatentStore

_TILE = 128  # pixels of the longer side of a tile in the picture


@torch.no_grad()
def sample_tokens(
    model: WanModel,
    flow: FlowMatching,
    sequence: Sequence,
    text: Tensor,
    *,
    steps: int = 30,
    guidance: float = 1.0,
) -> Tensor:
    """Tokens `[L, 64]` of a new sample: dx/ds = v from s = 1 (noise) to s = 0, in Euler steps.

    Args:
        sequence: its bucket is the shape; its key names the noise.
        text: `[text_len, text_dim]`.
        steps: times are evenly spaced before the shift of the bucket.
        guidance: weight of the caption; above 1 the model is also run without it.
    """
    device = next(model.parameters()).device
    tokens = range(sequence.num_tokens)
    positions = positions_of(tokens, sequence.bucket.grid).to(device)
    segments = torch.zeros(len(tokens), dtype=torch.int64, device=device)
    context = text[None].float().to(device)

    def velocity(x: Tensor, s: float, condition: Tensor) -> Tensor:
        time = torch.tensor([flow.time_scale * s], device=device)
        return model(x, positions, segments, time, condition, [len(tokens)])

    k = flow.shift_of(sequence.bucket)
    even = [1.0 - i / steps for i in range(steps + 1)]
    times = [k * u / (1.0 + (k - 1.0) * u) for u in even]
    x = flow.noise(0, sequence, tokens).to(device)
    for now, after in pairwise(times):
        v = velocity(x, now, context)
        if guidance != 1.0:
            without = velocity(x, now, torch.zeros_like(context))
            v = without + guidance * (v - without)
        x = x + (after - now) * v
    return x


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

    def pair(sequence: Sequence) -> tuple[Tensor, Tensor]:
        real = store.read_tokens(sequence, range(sequence.num_tokens))["latents"].float()
        made = sample_tokens(model, flow, sequence, store.read_sequence(sequence)["text"], steps=steps).cpu()
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
