"""The nouns of sequence placement. Standard library only: usable where torch is not installed."""

from zellige_lightning.placement.attention import AttentionGeometry
from zellige_lightning.placement.plan import Filling, ParallelConfig, PlacementOption, Plan, whole
from zellige_lightning.placement.schedule import Block, RankSchedule, Segment, build_schedule
from zellige_lightning.placement.sequence import Bucket, Catalog, GlobalBatch, Sequence
from zellige_lightning.placement.topology import Topology

__all__ = [
    "AttentionGeometry",
    "Block",
    "Bucket",
    "Catalog",
    "Filling",
    "GlobalBatch",
    "ParallelConfig",
    "PlacementOption",
    "Plan",
    "RankSchedule",
    "Segment",
    "Sequence",
    "Topology",
    "build_schedule",
    "whole",
]
