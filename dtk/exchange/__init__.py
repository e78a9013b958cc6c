"""Exchanges: what workers send each other, and when."""

from __future__ import annotations

from dtk.exchange.auto import Auto
from dtk.exchange.codec import BITS
from dtk.exchange.contract import Exchange
from dtk.exchange.delayed import Delayed
from dtk.exchange.dense import Dense
from dtk.exchange.downpour import Downpour
from dtk.exchange.local_steps import BlockMomentum, ModelAveraging
from dtk.exchange.quantized import WHOLE, Quantized
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

# Short names of exchanges.
NAMES: dict[str, Exchange] = {
    "auto": Auto(),
    "fp16": Dense("float16"),
    "bf16": Dense("bfloat16"),
    **{f"{bits}bit": Quantized(bits) for bits in (*BITS, WHOLE)},
}
_WORDS = ", ".join(repr(name) for name in NAMES if not name.endswith("bit"))
_WANTED = f"{_WORDS}, '{BITS[0]}bit' to '{BITS[-1]}bit' or '{WHOLE}bit'"


def parse(exchange: object) -> Exchange:
    """Return the exchange that a user gave: a value, a short name, or None for whole gradients.

    Args:
        exchange: The user's value.

    Raises:
        ValueError: The name is unknown.
        TypeError: The value is not an exchange, or is a `Downpour`, which is for parameter servers.

    Example:
        >>> parse("1bit"), parse(None)
        (Quantized(bits=1), Dense(dtype=None, factors=True))
    """
    if exchange is None:
        return Dense()
    if isinstance(exchange, Exchange):
        return exchange
    if isinstance(exchange, Downpour):
        raise TypeError(
            f"exchange={exchange!r} belongs to parameter servers: "
            'ParameterServerStrategy("async", exchange=Downpour(...)). For fewer or smaller '
            "messages without servers use Quantized(bits=1) or BlockMomentum(block_size=4096)"
        )
    if not isinstance(exchange, str):
        raise TypeError(
            f"exchange={exchange!r}; expected a value of dtk.exchange such as Quantized(bits=1), "
            f"or one of {_WANTED}"
        )
    if exchange not in NAMES:
        raise ValueError(
            f"exchange={exchange!r}; expected one of {_WANTED}, or a value of dtk.exchange such as "
            "BlockMomentum(block_size=4096)"
        )
    return NAMES[exchange]
