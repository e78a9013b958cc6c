"""Strategies: who computes what; Keras trains under them."""

from __future__ import annotations

from dtk.parameter_server.consistency_models import Async, BoundedDelay, SerialStart, Sync
from dtk.parameter_server.job_context import EvaluatorConfig
from dtk.parameter_server.proximal import least_squares_smoothness, rate_bound
from dtk.strategies.allreduce import AllReduceStrategy
from dtk.strategies.auto_strategy import auto_strategy
from dtk.strategies.block_minimization import minimize_blocks
from dtk.strategies.mirrored import MirroredStrategy
from dtk.strategies.parameter_server import ParameterServerStrategy
from dtk.trainer.guard import undistributed

__all__ = [
    "AllReduceStrategy",
    "Async",
    "BoundedDelay",
    "EvaluatorConfig",
    "MirroredStrategy",
    "ParameterServerStrategy",
    "SerialStart",
    "Sync",
    "auto_strategy",
    "least_squares_smoothness",
    "minimize_blocks",
    "rate_bound",
    "undistributed",
]
