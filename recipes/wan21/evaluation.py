"""How well a model denoises held-out samples, with noise and times that never change."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from zellige_lightning.batch import positions_of
from zellige_lightning.errors import DataError
from zellige_lightning.placement import Sequence
from zellige_lightning.recipes.wan21.flow import FlowMatching, per_token_loss
from zellige_lightning.recipes.wan21.model import WanModel
from zellige_lightning.sources import TokenSource


@dataclass(frozen=True)
class EvaluationLoss:
    """Mean loss over (sample, noise, time) draws of each kind, and how many draws that is."""

    image: float
    video: float
    num_images: int
    num_videos: int


@torch.no_grad()
def evaluate(
    model: WanModel,
    source: TokenSource,
    sequences: Rows[Sequence],
    draws: int,
    seed: int,
    flow: FlowMatching | None = None,
) -> EvaluationLoss:
    """Loss of images and of videos, each sample alone and whole, so that no engine is needed.

    Args:
        sequences: samples of both kinds.
        draws: (noise, time) pairs of each sample; the same for every model of the same `seed`.
        flow: the objective; default, that of training.

    Raises:
        DataError: no image, or no video.
    """
    flow = (flow or FlowMatching()).for_evaluation(seed)
    losses: dict[bool, list[float]] = {False: [], True: []}
    for sequence in sequences:
        for draw in range(draws):
            losses[sequence.bucket.is_video].append(_loss(model, source, sequence, flow, draw))
    if not losses[False] or not losses[True]:
        raise DataError("evaluation needs images and videos", fix="hold out some samples of each kind")
    image, video = (sum(losses[kind]) / len(losses[kind]) for kind in (False, True))
    return EvaluationLoss(image, video, len(losses[False]), len(losses[True]))


def _loss(model: WanModel, source: TokenSource, sequence: Sequence, flow: FlowMatching, draw: int) -> float:
    device = next(model.parameters()).device
    tokens = range(sequence.num_tokens)
    latents = source.read_tokens(sequence, tokens)["latents"].to(device)
    text = source.read_sequence(sequence)["text"].to(device)
    inputs = flow.inputs(draw, [sequence], [tokens], latents)
    positions = positions_of(tokens, sequence.bucket.grid).to(device)
    segment_ids = torch.zeros(len(tokens), dtype=torch.int64, device=device)
    velocity = model(inputs.tokens, positions, segment_ids, inputs.timesteps, text[None], [len(tokens)])
    return per_token_loss(velocity, inputs.target).mean().item()
