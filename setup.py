"""Finds the packages; everything else is declared in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["zellige_lightning", "zellige_lightning.*"]),
        "zellige_lightning.conf",
        "zellige_lightning.recipes",
        *(f"zellige_lightning.recipes.{name}" for name in find_packages("recipes")),
        "hydra_plugins.zellige_searchpath",
    ]
)
