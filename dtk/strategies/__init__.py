"""Strategies: what Keras sees."""

from dtk.strategies.allreduce import AllReduceStrategy
from dtk.strategies.auto import auto_strategy
from dtk.strategies.consistency import Async, BoundedDelay, Sync, WarmStart
from dtk.strategies.mirrored import MirroredStrategy
from dtk.strategies.parameter_server import ParameterServerStrategy

__all__ = [
    "AllReduceStrategy",
    "Async",
    "BoundedDelay",
    "MirroredStrategy",
    "ParameterServerStrategy",
    "Sync",
    "WarmStart",
    "auto_strategy",
]
