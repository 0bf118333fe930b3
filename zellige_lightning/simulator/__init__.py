"""Modeled clusters and the simulation of steps on them. Imports neither torch nor lightning."""
