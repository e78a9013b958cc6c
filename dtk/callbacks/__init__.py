"""Callbacks for `model.fit` under a dtk strategy, one per file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtk.callbacks.asynchronous_warmup import AsynchronousWarmup
    from dtk.callbacks.auto_batch_size import AutoBatchSize
    from dtk.callbacks.batch_norm_statistics import BatchNormStatistics
    from dtk.callbacks.batch_size_schedule import BatchSizeSchedule, parse_schedule
    from dtk.callbacks.broadcast_variables import BroadcastVariables
    from dtk.callbacks.checkpoint import Checkpoint
    from dtk.callbacks.communication_stats import CommunicationStats
    from dtk.callbacks.cross_validation import CrossValidation
    from dtk.callbacks.final_test import FinalTest
    from dtk.callbacks.find_non_finite import FindNonFinite
    from dtk.callbacks.grow_batch_instead_of_decay import GrowBatchInsteadOfDecay
    from dtk.callbacks.halve_rate import HalveRate
    from dtk.callbacks.hyperparameters.epochs import epochs_per_worker
    from dtk.callbacks.learning_rate_scaling import LearningRateScaling
    from dtk.callbacks.momentum_schedule import MomentumSchedule
    from dtk.callbacks.progress_printer import ProgressPrinter
    from dtk.callbacks.sample_rate import SampleRate
    from dtk.callbacks.server_report import ServerReport

_HOMES = {
    "AsynchronousWarmup": "asynchronous_warmup",
    "AutoBatchSize": "auto_batch_size",
    "BatchNormStatistics": "batch_norm_statistics",
    "BatchSizeSchedule": "batch_size_schedule",
    "BroadcastVariables": "broadcast_variables",
    "Checkpoint": "checkpoint",
    "CommunicationStats": "communication_stats",
    "CrossValidation": "cross_validation",
    "FinalTest": "final_test",
    "FindNonFinite": "find_non_finite",
    "GrowBatchInsteadOfDecay": "grow_batch_instead_of_decay",
    "HalveRate": "halve_rate",
    "LearningRateScaling": "learning_rate_scaling",
    "MomentumSchedule": "momentum_schedule",
    "ProgressPrinter": "progress_printer",
    "SampleRate": "sample_rate",
    "ServerReport": "server_report",
    "epochs_per_worker": "hyperparameters.epochs",
    "parse_schedule": "batch_size_schedule",
}

__all__ = [
    "AsynchronousWarmup",
    "AutoBatchSize",
    "BatchNormStatistics",
    "BatchSizeSchedule",
    "BroadcastVariables",
    "Checkpoint",
    "CommunicationStats",
    "CrossValidation",
    "FinalTest",
    "FindNonFinite",
    "GrowBatchInsteadOfDecay",
    "HalveRate",
    "LearningRateScaling",
    "MomentumSchedule",
    "ProgressPrinter",
    "SampleRate",
    "ServerReport",
    "epochs_per_worker",
    "parse_schedule",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"dtk.callbacks.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'dtk.callbacks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
