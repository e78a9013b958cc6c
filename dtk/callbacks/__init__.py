"""Callbacks for `model.fit` under a dtk strategy."""

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
from dtk.callbacks.learning_rate import AsynchronousWarmup, LearningRateScaling, epochs_per_worker
from dtk.callbacks.reports import CommunicationStats, ProgressPrinter, ServerReport
from dtk.callbacks.sample_rate import MomentumSchedule, SampleRate

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
