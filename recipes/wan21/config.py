"""Sizes of the Wan2.1 text-to-video transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from zellige_lightning.errors import ConfigError


@dataclass(frozen=True)
class WanConfig:
    """Names as in the original configuration files.

    Args:
        dim: model width, num_heads * head_dim.
        ffn_dim: hidden width of the feed-forward part.
        num_layers: transformer blocks.
        text_dim: width of a text embedding; text_len: its rows, padding included.
        freq_dim: width of the sinusoidal embedding of time.
        in_dim, out_dim: latent channels.
        eps: of all normalisations.

    Raises:
        ConfigError: a size that is no positive integer, or a head that cannot carry three rotary axes.
    """

    dim: int
    ffn_dim: int
    num_heads: int
    num_layers: int
    text_dim: int = 4096
    text_len: int = 512
    freq_dim: int = 256
    in_dim: int = 16
    out_dim: int = 16
    eps: float = 1e-6

    patch_size = (1, 2, 2)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "eps" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"model.{f.name}={value!r}", fix="give a positive integer")
        if not self.eps > 0.0:
            raise ConfigError(f"model.eps={self.eps!r}", fix="give a positive number such as 1e-6")
        if self.freq_dim % 2:
            raise ConfigError(
                f"model.freq_dim={self.freq_dim}", fix="it holds sine and cosine pairs: make it even"
            )
        if self.dim % self.num_heads:
            raise ConfigError(
                f"model.dim={self.dim} is no multiple of num_heads={self.num_heads}", fix="change one"
            )
        if self.head_dim % 2 or self.head_dim < 6:
            raise ConfigError(
                f"model.dim/num_heads gives heads of {self.head_dim}; rotary positions need pairs on 3 axes",
                fix="choose an even head size of at least 6, such as 24, 32 or 128",
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def rope_pairs(self) -> tuple[int, int, int]:
        """Complex pairs of a head for (t, y, x): 22, 21, 21 of 64 for heads of 128."""
        third = self.head_dim // 2 // 3
        return self.head_dim // 2 - 2 * third, third, third


CONFIGS: Mapping[str, WanConfig] = {
    "tiny": WanConfig(dim=96, ffn_dim=192, num_heads=4, num_layers=2, text_dim=64, text_len=16, freq_dim=64),
    "demo": WanConfig(dim=128, ffn_dim=384, num_heads=4, num_layers=3, text_dim=64, text_len=16, freq_dim=64),
    "wan21_1_3b": WanConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30),
    "wan21_14b": WanConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40),
}


def named_config(name: str) -> WanConfig:
    """Raises `ConfigError`, naming the sizes that there are."""
    if name not in CONFIGS:
        raise ConfigError(f"no model size is called {name!r}", fix=f"choose one of {', '.join(CONFIGS)}")
    return CONFIGS[name]
