"""Every figure of the simulator that is not a property of a cluster (conf/cluster/): the model, the paper's
workloads, and the paper's own results, for comparison.

Sources: "paper" is the Zellige paper; "Wan2.1" its public configuration; "fitted" and "assumed" mean just
that.
"""

from __future__ import annotations

from dataclasses import dataclass

from zellige_lightning.placement.attention import AttentionGeometry
from zellige_lightning.placement.sequence import Bucket
from zellige_lightning.planner.cost import ModelGeometry


@dataclass(frozen=True)
class Transformer:
    """A DiT: layers, width d, heads, FFN width f, text tokens of cross-attention, parameters."""

    name: str
    layers: int
    width: int
    heads: int
    ffn: int
    text_tokens: int
    parameters: int
    element_bytes: int = 2
    transient_bytes_per_token: int = 41_000

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def linear_flops_per_token(self) -> int:
        """Forward operations per token and layer outside self-attention: 12 d^2 + 4 d f + 4 d text."""
        return 12 * self.width**2 + 4 * self.width * self.ffn + 4 * self.width * self.text_tokens

    @property
    def attention(self) -> AttentionGeometry:
        return AttentionGeometry(self.heads, self.head_dim, self.element_bytes)

    @property
    def geometry(self) -> ModelGeometry:
        """With full activation checkpointing: one input per layer and token is kept."""
        return ModelGeometry(
            num_layers=self.layers,
            num_heads=self.heads,
            head_dim=self.head_dim,
            element_bytes=self.element_bytes,
            resident_bytes_per_token=self.layers * self.width * self.element_bytes,
            transient_bytes_per_token=self.transient_bytes_per_token,
            bytes_per_sequence=0,
        )


# Wan2.1: widths, heads, parameters of the public checkpoints. transient_bytes_per_token: assumed for 1.3B
# (about two FFN activations and the attention inputs of the layer that is recomputed), scaled by the widths
# for 14B.
WAN_1_3B = Transformer("Wan2.1-1.3B", 30, 1536, 12, 8960, 512, 1_418_996_800)
WAN_14B = Transformer(
    "Wan2.1-14B", 40, 5120, 40, 13824, 512, 14_288_491_584, transient_bytes_per_token=90_000
)
MODELS = {"wan21_1_3b": WAN_1_3B, "wan21_14b": WAN_14B}

# Wan2.1's grids (T, H, W) in tokens at 16 frames per second: 8x8 pixels per latent, 2x2 latents per token.
# Clip seconds -> latent frames, 1 + (frames - 1) / 4. Paper, Sec. I: 15 seconds of 1080p are 497,760 tokens.
LATENT_FRAMES = {10: 41, 15: 61}
ROWS_COLUMNS = {"256p": (16, 16), "480p": (30, 52), "720p": (45, 80), "1080p": (68, 120)}

# The paper's suites: video-token share 35 to 60 percent (Sec. V-A). The mixes inside are assumed: the paper
# gives none.
SHARES = (35, 40, 45, 50, 55, 60)
VIDEO_MIX = {"480p": 0.13, "720p": 0.22, "1080p": 0.65}  # assumed
IMAGE_MIX = {"256p": 0.10, "480p": 0.20, "720p": 0.35, "1080p": 0.35}  # assumed


def image(name: str) -> Bucket:
    return Bucket(f"image-{name}", (1, *ROWS_COLUMNS[name]))


def video(name: str, seconds: int) -> Bucket:
    return Bucket(f"video-{name}-{seconds}s", (LATENT_FRAMES[seconds], *ROWS_COLUMNS[name]))


@dataclass(frozen=True)
class Suite:
    """A workload suite of the paper: clips of `seconds`, a token budget per rank, a cluster and a world."""

    name: str
    seconds: int
    tokens_per_rank: int
    ranks: int
    cluster: str
    figure: str


# Paper, Sec. V-A.
SUITES = {
    "n8_high": Suite("n8_high", 10, 350_000, 8, "a800", "Fig. 5a"),
    "n8_low": Suite("n8_low", 10, 125_000, 8, "a800", "Fig. 5b"),
    "n16": Suite("n16", 15, 350_000, 16, "a800", "Fig. 7a"),
    "n32": Suite("n32", 15, 175_000, 32, "a6000", "Fig. 7b"),
}

# The paper's results: speedups of its planner over a rival as (least, mean, largest); None where it gives
# no number.
Range = tuple[float | None, float | None, float | None]
PAPER_SPEEDUPS: dict[str, dict[str, Range]] = {
    "n8_high": {
        "knapformer": (1.10, 1.22, 1.31),
        "usp": (None, 1.33, None),
        "adaptive_load": (None, 2.28, None),
    },
    "n8_low": {"knapformer": (1.08, 1.14, 1.22), "adaptive_load": (5.33, None, 7.19)},
    "n16": {"knapformer": (1.12, 1.25, 1.48), "usp": (1.63, 1.76, 2.06)},
    "n32": {"knapformer": (1.27, 1.42, 1.54), "usp": (1.72, 1.95, 2.45)},
}
PAPER_OOM = {"n16": ("adaptive_load",), "n32": ("adaptive_load",)}  # paper, Fig. 7

PAPER_MEMORY_RATIO = 1_307  # Fig. 1a: 256p image to 10-second 1080p video
PAPER_COMPUTE_RATIO = 40_451  # Fig. 1a; not derivable from its text
FITTED_CROSSOVER_TOKENS = 10_905.15  # fitted: c for which L (c + L) has that ratio
PAPER_FIG3A = {"naive": (1.27, 1.31), "adaptive_load": (1.25, 1.27)}  # max / mean of rank times, 4 A800
PAPER_FIG3B = {"256p": (0.573, 0.710), "1080p": (0.177, 0.338)}  # communication share of attention time
# Attention bytes over those of USP, and over those of KnapFormer, high-load V50.
PAPER_FIG6A = {"exact": 0.254, "usp": 1.0, "adaptive_load": 0.0}
PAPER_FIG6A_VS_KNAPFORMER = 0.649
# Largest over mean of rank times, high-load V50.
PAPER_FIG6B = {"exact": 1.00, "usp": 1.00, "knapformer": 1.21, "adaptive_load": 2.34}
