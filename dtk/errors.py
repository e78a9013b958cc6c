"""Errors that dtk raises: each says what was given, what was expected and what to do next.

Each class also derives from the matching built-in error, so `except ValueError` keeps working:

    >>> issubclass(ClusterError, ValueError)
    True
"""

import math
import numbers
from collections.abc import Callable


class DtkError(Exception):
    """Base of every error dtk raises on purpose."""


class ClusterError(DtkError, ValueError):
    """The environment (TF_CONFIG, hostfile, MPI, Slurm) contradicts itself or cannot be read."""


class CommunicatorError(DtkError, RuntimeError):
    """A communicator could not start, or a collective was called in a way that cannot work."""


class NotDistributedError(DtkError, RuntimeError):
    """Training would have gone on without the reductions that make it distributed."""

    # TensorFlow raises an error in tracing again: as the same class if its `__init__` is that of
    # Exception, else as a class it makes itself.
    __init__ = Exception.__init__


class DisagreementError(DtkError, RuntimeError):
    """Ranks differ in something they must agree on: variables, steps, scripts, versions."""


class VersionError(DtkError, ImportError):
    """The installed TensorFlow or Keras lacks a private name that dtk needs."""


class CheckpointInUseError(DtkError, RuntimeError):
    """Another job saves its checkpoints to the same directory."""


class CheckpointFormatError(DtkError, ValueError):
    """A newer dtk wrote the checkpoint, in a format that this version does not know."""


class CheckpointSaveError(DtkError, OSError):
    """A checkpoint could not be written: the disk is full, read-only or gone."""


class NonFiniteError(DtkError, FloatingPointError):
    """Training has reached numbers that are NaN or infinite."""


def check_number(name: str, value: object, expected: str, fits: Callable[[float], bool]) -> None:
    """Refuse a value that is not a finite number, or does not fit.

    >>> check_number("momentum", float("nan"), "0.0 up to but below 1.0", lambda m: 0 <= m < 1)
    Traceback (most recent call last):
    ValueError: momentum=nan; expected 0.0 up to but below 1.0
    """
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        number = float(value)
        if math.isfinite(number) and fits(number):
            return
    raise ValueError(f"{name}={value!r}; expected {expected}")


def at_rank(rank: int, message: str) -> str:
    """Put the rank in front of a message.

    >>> at_rank(3, "batch_size=6 is smaller than 8 workers; use 8 or more")
    'rank 3: batch_size=6 is smaller than 8 workers; use 8 or more'
    """
    return f"rank {rank}: {message}"
