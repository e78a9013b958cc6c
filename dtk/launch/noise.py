"""Lines of standard error that the launcher leaves out: TensorFlow's start-up noise."""

from __future__ import annotations

from dtk.quiet import is_noise

__all__ = ["is_noise"]
