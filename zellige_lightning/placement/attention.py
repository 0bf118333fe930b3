"""The self-attention of one layer, as those who count its bytes need to know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionGeometry:
    """Heads, their size, bytes of an element, and of one of an accumulator (dk, dv, log-sum-exp)."""

    num_heads: int
    head_dim: int
    element_bytes: int = 2
    accumulation_bytes: int = 4

    @property
    def token_bytes(self) -> int:
        """Of one head of one token of q, k, v or out."""
        return self.head_dim * self.element_bytes

    @property
    def gradient_bytes(self) -> int:
        """Of one head of one token of dk and dv while they are summed."""
        return 2 * self.head_dim * self.accumulation_bytes

    def scattered_bytes(self, forward: bool) -> int:
        """Of one head of one token in the head exchange before attention: q, k and v, in backward out, its
        gradient and the log-sum-exp too."""
        return 3 * self.token_bytes if forward else 5 * self.token_bytes + self.accumulation_bytes

    def returned_bytes(self, forward: bool) -> int:
        """Likewise after attention: out and the log-sum-exp, in backward the gradients of q, k and v."""
        return self.token_bytes + self.accumulation_bytes if forward else 3 * self.token_bytes
