"""Layers whose work or weights several ranks share."""

from dtk.layers.pipeline import Pipeline
from dtk.layers.whole import whole

__all__ = ["Pipeline", "whole"]
