"""Flow matching with draws that do not depend on placement.

x_s = (1-s) x0 + s n, target v = n - x0, time fed to the model t = 1000 s, loss = mean squared error in fp32.
s = k u / (1 + (k-1) u) with u logit-normal and a shift k that may differ by bucket.

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

import torch
from torch import Tensor

from zellige_lightning.errors import ConfigError
from zellige_lightning.placement import Bucket, Sequence
from zellige_lightning.recipes.wan21.layers import full_precision
from zellige_lightning.recipes.wan21.patchify import TOKEN_DIM


@dataclass(frozen=True)
class FlowInputs:
    """What the model sees and must say. T local tokens, S local segments.

    Args:
        tokens: x_s, `[T, 64]` float32.
        target: v, `[T, 64]` float32.
        timesteps: 1000 s of each segment, `[S]` float32.
        dropped: whether the caption of each segment is dropped, `[S]` bool.
    """

    tokens: Tensor
    target: Tensor
    timesteps: Tensor
    dropped: Tensor


@dataclass(frozen=True)
class FlowMatching:
    """The objective and its random draws.

    Args:
        seed: draws change with it.
        shift: k; larger spends more of the training at high noise.
        bucket_shifts: k of single buckets, by name, in place of `shift`.
        logit_mean, logit_std: of the normal distribution whose sigmoid is u.
        caption_dropout: probability that a sample trains without its caption (for classifier-free guidance).
        time_scale: t = time_scale * s.

    Raises:
        ConfigError: a shift or spread that is not positive, or a dropout outside [0, 1].
    """

    seed: int = 0
    shift: float = 3.0
    bucket_shifts: Mapping[str, float] = field(default_factory=dict)
    logit_mean: float = 0.0
    logit_std: float = 1.0
    caption_dropout: float = 0.1
    time_scale: float = 1000.0

    def __post_init__(self) -> None:
        shifts = {"shift": self.shift, **{f"bucket_shifts[{n}]": k for n, k in self.bucket_shifts.items()}}
        for name, value in {**shifts, "logit_std": self.logit_std, "time_scale": self.time_scale}.items():
            if not (math.isfinite(value) and value > 0.0):
                raise ConfigError(f"flow.{name}={value}", fix="give a positive number")
        if not 0.0 <= self.caption_dropout <= 1.0:
            raise ConfigError(f"flow.caption_dropout={self.caption_dropout}", fix="give a probability")

    def for_evaluation(self, seed: int) -> FlowMatching:
        """The same objective with draws of its own and every caption kept."""
        return replace(self, seed=_hash("evaluation", self.seed, seed), caption_dropout=0.0)

    def sigma(self, epoch: int, sequence: Sequence) -> float:
        """s of a sequence: a Python float, so that no precision of the model rounds it."""
        normal = torch.randn(
            (), generator=self._generator("time", epoch, sequence.key), dtype=torch.float64
        ).item()
        u = 1.0 / (1.0 + math.exp(-(self.logit_mean + self.logit_std * normal)))
        k = self.shift_of(sequence.bucket)
        return k * u / (1.0 + (k - 1.0) * u)

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
        sigmas = torch.tensor([self.sigma(epoch, s) for s in sequences], dtype=torch.float64)
        counts = torch.tensor([len(r) for r in tokens], dtype=torch.int64)
        s = torch.repeat_interleave(sigmas, counts).float()[:, None].to(device)  # [T, 1]
        x0 = latents.float()
        dropped = torch.tensor([self.drops_caption(epoch, s.key) for s in sequences], dtype=torch.bool)
        return FlowInputs(
            tokens=(1.0 - s) * x0 + s * noise,
            target=noise - x0,
            timesteps=(self.time_scale * sigmas).float().to(device),
            dropped=dropped.to(device),
        )

    def _frame_noise(self, epoch: int, key: str, frame: int, per_frame: int) -> Tensor:
        generator = self._generator("noise", epoch, key, frame)
        return torch.randn(per_frame, TOKEN_DIM, generator=generator, dtype=torch.float32)

    def _generator(self, purpose: str, *names: int | str) -> torch.Generator:
        return torch.Generator().manual_seed(_hash(purpose, self.seed, *names))


def per_token_loss(velocity: Tensor, target: Tensor) -> Tensor:
    """Mean squared error over the 64 values of each token, `[T]`, in fp32 (fp64 for an fp64 model)."""
    return (full_precision(velocity) - target).square().mean(dim=-1)


def _hash(*names: int | str) -> int:
    """64 bits of SHA-256; JSON keeps ("a", 1) and ("a1",) apart."""
    return int.from_bytes(hashlib.sha256(json.dumps(names).encode()).digest()[:8], "big")
