"""Callbacks for `model.fit` under a dtk strategy."""
# ruff: noqa: F401 - type checkers see the names by these imports, scripts by `__getattr__`

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtk.callbacks.batch_norm_statistics import BatchNormStatistics
    from dtk.callbacks.batch_size import (
        AutoBatchSize,
        BatchSizeSchedule,
        GrowBatchInsteadOfDecay,
        parse_schedule,
    )
    from dtk.callbacks.broadcast_variables import BroadcastVariables
    from dtk.callbacks.checkpoint import Checkpoint
    from dtk.callbacks.evaluation import CrossValidation, FinalTest, HalveRate
    from dtk.callbacks.find_non_finite import FindNonFinite
    from dtk.callbacks.learning_rate import (
        AsynchronousWarmup,
        LearningRateScaling,
        epochs_per_worker,
    )
    from dtk.callbacks.reports import (
        CommunicationStats,
        ProgressPrinter,
        ServerReport,
        TrainingSummary,
    )
    from dtk.callbacks.sample_rate import MomentumSchedule, SampleRate

_NAMES = {
    "batch_norm_statistics": ("BatchNormStatistics",),
    "batch_size": (
        "AutoBatchSize",
        "BatchSizeSchedule",
        "GrowBatchInsteadOfDecay",
        "parse_schedule",
    ),
    "broadcast_variables": ("BroadcastVariables",),
    "checkpoint": ("Checkpoint",),
    "evaluation": ("CrossValidation", "FinalTest", "HalveRate"),
    "find_non_finite": ("FindNonFinite",),
    "learning_rate": ("AsynchronousWarmup", "LearningRateScaling", "epochs_per_worker"),
    "reports": ("CommunicationStats", "ProgressPrinter", "ServerReport", "TrainingSummary"),
    "sample_rate": ("MomentumSchedule", "SampleRate"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"dtk.callbacks.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'dtk.callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
