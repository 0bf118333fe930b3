"""New samples from noise along the learnt velocity, by diffusers' ODE solvers, whole or split by plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zellige_lightning.batch import RankBatch
from zellige_lightning.errors import ConfigError
from zellige_lightning.recipes.wan21.flow import FlowMatching
from zellige_lightning.recipes.wan21.model import WanModel

SOLVERS = ("unipc", "euler")


@dataclass(frozen=True)
class SamplerSettings:
    """How samples are drawn.

    Args:
        solver: `unipc`, as the published pipelines of Wan2.1, or `euler`.
        steps: forwards of the model; twice as many with guidance.
        guidance: weight of the caption; above 1 the model is also run without it.

    Raises:
        ConfigError: an unknown solver, or less than one step.
    """

    solver: str = "unipc"
    steps: int = 30
    guidance: float = 1.0

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise ConfigError(f"solver={self.solver!r}", fix=f"choose one of {', '.join(SOLVERS)}")
        if self.steps < 1:
            raise ConfigError(f"steps={self.steps}", fix="take at least one step")


@torch.no_grad()
def sample_batch(
    model: WanModel, flow: FlowMatching, batch: RankBatch, settings: SamplerSettings | None = None
) -> Tensor:
    """Tokens `[T, 64]` that this rank holds of new samples, one for each sequence of `batch`.

    The sequences give shapes, captions and, by their keys, the noise; their latents are not looked at. A
    solver acts on single values, so that a split sequence becomes what it would be whole. All ranks run as
    many forwards, whatever they hold.

    Args:
        flow: its shift of each bucket spaces the steps.
    """
    settings = settings or SamplerSettings()
    device = batch.positions.device
    text = batch.context["text"].float()
    noise = [flow.noise(0, q, s.tokens) for q, s in zip(batch.sequences, batch.segments, strict=True)]
    x = torch.cat(noise).to(device)
    shifts = torch.tensor([flow.shift_of(sequence.bucket) for sequence in batch.sequences])
    solvers = {shift: _solver(settings, shift, device) for shift in shifts.unique().tolist()}
    rows = {shift: (shifts == shift).to(device)[batch.segment_ids] for shift in solvers}

    def velocity(times: Tensor, context: Tensor) -> Tensor:
        return model(x, batch.positions, batch.segment_ids, times, context, batch.lengths)

    for step in range(settings.steps):
        now = {shift: solver.timesteps[step] for shift, solver in solvers.items()}
        times = torch.stack([now[shift] for shift in shifts.tolist()]).float() * (flow.time_scale / 1000.0)
        v = velocity(times, text)
        if settings.guidance != 1.0:
            without = velocity(times, torch.zeros_like(text))
            v = without + settings.guidance * (v - without)
        x = x.clone()
        for shift, solver in solvers.items():
            where = rows[shift]
            x[where] = solver.step(v[where], now[shift], x[where], return_dict=False)[0]
    return x


def _solver(settings: SamplerSettings, shift: float, device: torch.device) -> Any:
    """A solver from diffusers, its times evenly spaced before the shift. Keeps state for one sampling."""
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    if settings.solver == "euler":
        solver = FlowMatchEulerDiscreteScheduler(shift=shift)
        even = [1.0 - i / settings.steps for i in range(settings.steps)]
        solver.set_timesteps(sigmas=even, device=device)
    else:
        solver = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
        )
        solver.set_timesteps(settings.steps, device=device)
    return solver


def whole_samples(batch: RankBatch, tokens: Tensor) -> dict[str, Tensor]:
    """This rank's share of each sample, by key: `[L, 64]`, zero where other ranks hold the tokens. The sum
    over ranks is the sample, to the bit."""
    found: dict[str, Tensor] = {}
    for sequence in batch.global_batch.sequences:
        found[sequence.key] = tokens.new_zeros(sequence.num_tokens, tokens.shape[1])
    parts = tokens.split(batch.lengths)
    for sequence, segment, part in zip(batch.sequences, batch.segments, parts, strict=True):
        if sequence.key in found:
            found[sequence.key][segment.tokens.start : segment.tokens.stop] = part
    return found
