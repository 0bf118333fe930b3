"""Flow matching with draws that do not depend on placement.

x_s = (1-s) x0 + s n, target v = n - x0, time fed to the model t = 1000 s, loss = mean squared error in fp32.
s = k u / (1 + (k-1) u) with a shift k that may differ by bucket, and u drawn logit-normal (what is known of
Wan's own training), uniformly, or as DiffSynth-Studio does: one of 1000 steps, the loss weighted by a bell.

Noise is a function of (seed, epoch, key, latent frame); the time and the caption drop are functions of
(seed, epoch, key). So every split of a sequence, every world size and every order of sequences sees the same
numbers, and a shard draws only the latent frames that it touches.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence as Rows
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement import Bucket, Sequence
from zellige_lightning.recipes.wan21.layers import full_precision
from zellige_lightning.recipes.wan21.patchify import TOKEN_DIM

TIMES = ("logit_normal", "uniform", "steps")
WEIGHTINGS = ("none", "bell")
_STEPS = 1000


@dataclass(frozen=True)
class FlowInputs:
    """What the model sees and must say. T local tokens, S local segments.

    Args:
        tokens: x_s, `[T, 64]` float32.
        target: v, `[T, 64]` float32.
        timesteps: 1000 s of each segment, `[S]` float32.
        dropped: whether the caption of each segment is dropped, `[S]` bool.
        weights: of the loss of each segment, `[S]` float32.
    """

    tokens: Tensor
    target: Tensor
    timesteps: Tensor
    dropped: Tensor
    weights: Tensor


@dataclass(frozen=True)
class FlowMatching:
    """The objective and its random draws.

    Args:
        seed: draws change with it.
        shift: k; larger spends more of the training at high noise.
        bucket_shifts: k of single buckets, by name, in place of `shift`.
        times: how u is drawn: `logit_normal`, `uniform`, or `steps`: one of 1, 0.999, ... 0.001.
        logit_mean, logit_std: of the normal distribution whose sigmoid is u, for `logit_normal`.
        weighting: of a sample's loss by its s: `none`, or `bell`, see `bell_weight`.
        caption_dropout: probability that a sample trains without its caption (for classifier-free guidance).
        time_scale: t = time_scale * s.

    Raises:
        ConfigError: an unknown choice, a shift or spread that is not positive, or a dropout outside [0, 1].
    """

    seed: int = 0
    shift: float = 3.0
    bucket_shifts: Mapping[str, float] = field(default_factory=dict)
    times: str = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    weighting: str = "none"
    caption_dropout: float = 0.1
    time_scale: float = 1000.0

    def __post_init__(self) -> None:
        shifts = {"shift": self.shift, **{f"bucket_shifts[{n}]": k for n, k in self.bucket_shifts.items()}}
        for name, value in {**shifts, "logit_std": self.logit_std, "time_scale": self.time_scale}.items():
            if not (math.isfinite(value) and value > 0.0):
                raise ConfigError(f"flow.{name}={value}", fix="give a positive number")
        if not 0.0 <= self.caption_dropout <= 1.0:
            raise ConfigError(f"flow.caption_dropout={self.caption_dropout}", fix="give a probability")
        for name, known in (("times", TIMES), ("weighting", WEIGHTINGS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"flow.{name}={getattr(self, name)!r}", fix=f"choose one of {', '.join(known)}"
                )

    def for_evaluation(self, seed: int) -> FlowMatching:
        """The same objective with draws of its own, every caption kept and every sample weighing alike."""
        seed = _hash("evaluation", self.seed, seed)
        return replace(self, seed=seed, caption_dropout=0.0, weighting="none")

    def sigma(self, epoch: int, sequence: Sequence) -> float:
        """s of a sequence: a Python float, so that no precision of the model rounds it."""
        generator = self._generator("time", epoch, sequence.key)
        if self.times == "logit_normal":
            normal = torch.randn((), generator=generator, dtype=torch.float64).item()
            u = 1.0 / (1.0 + math.exp(-(self.logit_mean + self.logit_std * normal)))
        else:
            u = torch.rand((), generator=generator, dtype=torch.float64).item()
        if self.times == "steps":
            u = 1.0 - math.floor(_STEPS * u) / _STEPS
        return shifted(u, self.shift_of(sequence.bucket))

    def weight(self, sigma: float, bucket: Bucket) -> float:
        """Of the loss of a sample that was noised with `sigma`."""
        return bell_weight(sigma, self.shift_of(bucket)) if self.weighting == "bell" else 1.0

    def shift_of(self, bucket: Bucket) -> float:
        return self.bucket_shifts.get(bucket.name, self.shift)

    def drops_caption(self, epoch: int, key: str) -> bool:
        draw = torch.rand((), generator=self._generator("caption", epoch, key), dtype=torch.float64).item()
        return draw < self.caption_dropout

    def noise(self, epoch: int, sequence: Sequence, tokens: range) -> Tensor:
        """n of a token range, `[len(tokens), 64]` float32: the rows that the whole sequence has there."""
        if not tokens:
            return torch.zeros(0, TOKEN_DIM)
        _, rows, columns = sequence.bucket.grid
        per_frame = rows * columns
        first, last = tokens.start // per_frame, (tokens.stop - 1) // per_frame
        frames = [
            self._frame_noise(epoch, sequence.key, frame, per_frame) for frame in range(first, last + 1)
        ]
        return torch.cat(frames)[tokens.start - first * per_frame : tokens.stop - first * per_frame]

    def inputs(
        self, epoch: int, sequences: Rows[Sequence], tokens: Rows[range], latents: Tensor
    ) -> FlowInputs:
        """Noise `latents`.

        Args:
            sequences, tokens: of each local segment, in buffer order.
            latents: x0, `[T, 64]`; the result lies on its device.
        """
        device = latents.device
        pairs = list(zip(sequences, tokens, strict=True))
        noise = torch.cat([self.noise(epoch, s, r) for s, r in pairs] or [torch.zeros(0, TOKEN_DIM)]).to(
            device
        )
        drawn = [self.sigma(epoch, sequence) for sequence in sequences]
        weights = [self.weight(s, q.bucket) for s, q in zip(drawn, sequences, strict=True)]
        sigmas = torch.tensor(drawn, dtype=torch.float64)
        counts = torch.tensor([len(r) for r in tokens], dtype=torch.int64)
        s = torch.repeat_interleave(sigmas, counts).float()[:, None].to(device)  # [T, 1]
        x0 = latents.float()
        dropped = torch.tensor([self.drops_caption(epoch, s.key) for s in sequences], dtype=torch.bool)
        return FlowInputs(
            tokens=(1.0 - s) * x0 + s * noise,
            target=noise - x0,
            timesteps=(self.time_scale * sigmas).float().to(device),
            dropped=dropped.to(device),
            weights=torch.tensor(weights, dtype=torch.float32).to(device),
        )

    def _frame_noise(self, epoch: int, key: str, frame: int, per_frame: int) -> Tensor:
        generator = self._generator("noise", epoch, key, frame)
        return torch.randn(per_frame, TOKEN_DIM, generator=generator, dtype=torch.float32)

    def _generator(self, purpose: str, *names: int | str) -> torch.Generator:
        return torch.Generator().manual_seed(_hash(purpose, self.seed, *names))


def shifted(u: float, shift: float) -> float:
    """s of an even u in [0, 1]."""
    return shift * u / (1.0 + (shift - 1.0) * u)


def bell_weight(sigma: float, shift: float) -> float:
    """exp(-2 (s - 1/2)^2) less its least value over the 1000 shifted steps, scaled so that its mean over them
    is 1: zero for pure noise, and 2.08 at s = 1/2 for the usual shift of 5."""
    least, mean = _bell_range(shift)
    return (_bell(sigma) - least) / mean


def _bell(sigma: float) -> float:
    return math.exp(-2.0 * (sigma - 0.5) ** 2)


@lru_cache
def _bell_range(shift: float) -> tuple[float, float]:
    """The least value over the steps, and the mean above it."""
    values = [_bell(shifted(1.0 - i / _STEPS, shift)) for i in range(_STEPS)]
    return min(values), sum(values) / _STEPS - min(values)


def per_token_loss(velocity: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over the 64 values of each token, `[T]`, in fp32 (fp64 for an fp64 model)."""
    return (full_precision(velocity) - target).square().mean(dim=-1)


def _hash(*names: int | str) -> int:
    """64 bits of SHA-256; JSON keeps ("a", 1) and ("a1",) apart."""
    return int.from_bytes(hashlib.sha256(json.dumps(names).encode()).digest()[:8], "big")
