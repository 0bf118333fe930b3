"""The Hydra tree. A package, so that `pkg://zellige_lightning.conf` finds it in the checkout and in a
wheel."""
