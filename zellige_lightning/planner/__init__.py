"""Planning: from prices, memory and a global batch to a `Plan`. Imports neither torch nor lightning."""

from zellige_lightning.planner.cost import MemoryModel, ModelGeometry, ProfileTable
from zellige_lightning.planner.options import legal_configs, legal_family, legal_rank_sets
from zellige_lightning.planner.planner import Planner, PlannerConfig, make_planner

__all__ = [
    "MemoryModel",
    "ModelGeometry",
    "Planner",
    "PlannerConfig",
    "ProfileTable",
    "legal_configs",
    "legal_family",
    "legal_rank_sets",
    "make_planner",
]
