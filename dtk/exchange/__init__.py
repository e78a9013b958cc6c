"""Exchanges: what workers send each other, and when."""

from dtk.exchange.auto import Auto
from dtk.exchange.base import Exchange
from dtk.exchange.block_momentum import BlockMomentum, ModelAveraging
from dtk.exchange.delayed import Delayed
from dtk.exchange.dense import Dense
from dtk.exchange.downpour import Downpour
from dtk.exchange.names import parse
from dtk.exchange.quantized import Quantized
from dtk.exchange.warm_start import WarmStart

__all__ = [
    "Auto",
    "BlockMomentum",
    "Delayed",
    "Dense",
    "Downpour",
    "Exchange",
    "ModelAveraging",
    "Quantized",
    "WarmStart",
    "parse",
]
