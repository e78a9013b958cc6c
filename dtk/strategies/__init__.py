"""Strategies: what Keras sees."""

from dtk.strategies.allreduce import AllReduceStrategy
from dtk.strategies.auto import auto_strategy
from dtk.strategies.consistency import Async, BoundedDelay, Sync, WarmStart
from dtk.strategies.guard import undistributed
from dtk.strategies.minimizing import minimize_blocks
from dtk.strategies.mirrored import MirroredStrategy
from dtk.strategies.parameter_server import ParameterServerStrategy
from dtk.strategies.proximal import least_squares_smoothness, rate_bound

__all__ = [
    "AllReduceStrategy",
    "Async",
    "BoundedDelay",
    "MirroredStrategy",
    "ParameterServerStrategy",
    "Sync",
    "WarmStart",
    "auto_strategy",
    "least_squares_smoothness",
    "minimize_blocks",
    "rate_bound",
    "undistributed",
]
