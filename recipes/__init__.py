"""Guests of the library: what a user would write. Installed as `zellige_lightning.recipes`."""
