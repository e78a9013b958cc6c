"""Layers whose work or weights several ranks share."""

from dtk.layers.pipeline import Pipeline

__all__ = ["Pipeline"]
