"""The placement policies of other systems, each one file, each on the same engine, prices and memory cap as
ours.

A policy is a function `solve(problem, brief) -> Solution`, as every planner is. docs/POLICIES.md says what
each one does and where it departs from the system that it is named after.
"""

from __future__ import annotations

# Where each policy's function lives; a module is imported when its policy is made.
POLICIES = {
    "naive": "zellige_lightning.planner.policies.naive:solve_naive",
    "adaptive_load": "zellige_lightning.planner.policies.adaptive_load:solve_adaptive_load",
    "usp": "zellige_lightning.planner.policies.usp:solve_usp",
    "knapformer": "zellige_lightning.planner.policies.knapformer:solve_knapformer",
    "disjoint": "zellige_lightning.planner.policies.disjoint:solve_disjoint",
    "flexsp": "zellige_lightning.planner.policies.flexsp:solve_flexsp",
    "megatron": "zellige_lightning.planner.policies.megatron:solve_megatron",
    "hotspa": "zellige_lightning.planner.policies.hotspa:solve_hotspa",
    "bytescale": "zellige_lightning.planner.policies.bytescale:solve_bytescale",
    "skrull": "zellige_lightning.planner.policies.skrull:solve_skrull",
}
