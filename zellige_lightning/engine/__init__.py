"""Runs a plan: exact attention over whole sequences and shards, with collectives in one global order."""

from zellige_lightning.engine.checkpoint import checkpoint
from zellige_lightning.engine.counters import Counters
from zellige_lightning.engine.engine import CoalescedAttentionEngine
from zellige_lightning.engine.groups import ProcessGroupCache
from zellige_lightning.engine.routing import AttentionRouter
from zellige_lightning.engine.varlen import varlen_attention

__all__ = [
    "AttentionRouter",
    "CoalescedAttentionEngine",
    "Counters",
    "ProcessGroupCache",
    "checkpoint",
    "varlen_attention",
]
