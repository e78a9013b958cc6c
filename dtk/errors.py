"""Errors that dtk raises: each says what was given, what was expected and what to do next.

Each class also derives from the matching built-in error, so `except ValueError` keeps working:

    >>> issubclass(ClusterError, ValueError)
    True
"""

import inspect
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

# TensorFlow's, where another rank is gone or cut off; by name, without importing it.
_LOST = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError")
# Exit code of a process that the same command may well bring further, as of EX_TEMPFAIL.
TRY_AGAIN = 75


class DtkError(Exception):
    """Base of every error dtk raises on purpose.

    Attributes:
        passing: Whether the cause lies outside of the script, and may be gone at another start.
    """

    passing = False


class ClusterError(DtkError, ValueError):
    """The environment (TF_CONFIG, hostfile, MPI, Slurm) contradicts itself or cannot be read."""


class CommunicatorError(DtkError, RuntimeError):
    """A communicator could not start, or a collective was called in a way that cannot work."""


class NotDistributedError(DtkError, RuntimeError):
    """Training would have gone on without the reductions that make it distributed."""

    # TensorFlow raises an error in tracing again: as the same class if its `__init__` is that of
    # Exception, else as a class it makes itself.
    __init__ = Exception.__init__


class UncompilableError(DtkError, ValueError):
    """A step would communicate, or compute something else, if XLA compiled it."""

    __init__ = Exception.__init__  # as above


class DisagreementError(DtkError, RuntimeError):
    """Ranks differ in something they must agree on: variables, steps, scripts, versions."""


class ReplacedError(DtkError, NotImplementedError):
    """A function of another library that dtk does in another way; the message says which."""


class VersionError(DtkError, ImportError):
    """The installed TensorFlow or Keras lacks a private name that dtk needs."""


class CheckpointInUseError(DtkError, RuntimeError):
    """Another job saves its checkpoints to the same directory."""

    passing = True  # where a node was lost, its lock is the server's to give up


class CheckpointFormatError(DtkError, ValueError):
    """A newer dtk wrote the checkpoint, in a format that this version does not know."""


class CheckpointSaveError(DtkError, OSError):
    """A checkpoint could not be written: the disk is full, read-only or gone."""


class RankError(DtkError):  # of no class that `catch` of a study may name
    """Another process has failed, in a way that cannot be raised here; the message names it."""


class NonFiniteError(DtkError, FloatingPointError):
    """Training has reached numbers that are NaN or infinite."""


class UnwritableError(DtkError, ValueError):
    """A file that was asked for cannot be written."""


def script_line() -> str:
    """Return the place in the script, file:line, from which dtk was called."""
    places = [(frame.filename, frame.lineno) for frame in inspect.stack(0)]
    own = [place for place in places if not is_of_library(place[0])]
    return "{}:{}".format(*(own or places)[0])


def is_of_library(file: str) -> bool:
    """Return whether code is dtk's, a package's or Python's own, such as functools."""
    ours, pythons = os.path.dirname(__file__), os.path.dirname(inspect.__file__)
    return any(part in file for part in (ours + os.sep, pythons + os.sep, "site-packages"))


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


def check_writable(files: Mapping[str, object]) -> None:
    """Refuse, before anything is done, a file that could not be written; by its option."""
    for option, file in files.items():
        path, why = Path(str(file or os.devnull)), ""
        if path.is_dir():
            why = f" is a directory; name a file, e.g. `{path / 'file'}`"
        elif not path.parent.is_dir():
            why = f": there is no directory {path.parent}; make it first"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = ": this user may not write there; name another file"
        if why:
            raise UnwritableError(f"{option} {file}{why}")


_Error = TypeVar("_Error", bound=DtkError)


def as_passing(error: _Error) -> _Error:
    """Mark an error as one whose cause may be gone at another start; return it."""
    error.passing = True
    return error


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that an exception ends.

    >>> exit_code(ValueError()), exit_code(CheckpointInUseError()), exit_code(KeyboardInterrupt())
    (1, 75, 130)
    """
    if isinstance(error, KeyboardInterrupt):
        return 130
    kind = type(error)
    lost = kind.__name__ in _LOST and kind.__module__.startswith("tensorflow")
    return TRY_AGAIN if lost or getattr(error, "passing", False) else 1


def at_rank(rank: int, message: str) -> str:
    """Put the rank in front of a message.

    >>> at_rank(3, "batch_size=6 is smaller than 8 workers; use 8 or more")
    'rank 3: batch_size=6 is smaller than 8 workers; use 8 or more'
    """
    return f"rank {rank}: {message}"


# Files that every rank makes, or one makes and another looks for.
_MADE = re.compile(r"FileExistsError\b|.*errors_impl\.AlreadyExistsError\b")
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|BadZipFile)\b")
_MISSING = re.compile(
    r"FileNotFoundError\b|.*errors_impl\.NotFoundError: .*No such file|"
    r"ValueError: File not found: filepath="
)
_HALF = re.compile(
    r".*errors_impl\.DataLossError\b|(zipfile\.)?BadZipFile\b|"
    r"EOFError: (Ran out of input|No data left in file|Compressed file ended)|"
    r"OSError: Unable to (synchronously )?open file \(truncated|BlockingIOError: .*unable to lock|"
    r".*OperationalError\b.*(database is locked|already exists)"
)
_SAYS_ITSELF = "no checkpoint can be written"  # rank 0 alone has tried, and all raise it

_MAKE = (
    "dtk: every rank runs the whole script, and another may have made that file first. Let rank 0 "
    "make it or unpack it, `if strategy.is_chief: os.mkdir(path)`, and the others wait, "
    "`strategy.communicator.barrier()`; os.makedirs(path, exist_ok=True) may be called by all."
)
_READ = (
    "dtk: every rank runs the whole script, but rank 0 alone writes the files of callbacks and "
    "model.save, and tempfile.mkdtemp() makes another directory on each. If rank 0 writes this "
    "file, let all ranks wait for it, `strategy.communicator.barrier()`, and give them one path: "
    "path = strategy.communicator.broadcast_object(path); or read it `if strategy.is_chief:`."
)
_WROTE = (
    "dtk: every rank runs the whole script, and another may be writing that file just now. Let "
    "rank 0 write it, `if strategy.is_chief:`, and the others wait, "
    "`strategy.communicator.barrier()`."
)


def advice_on_files(words: Sequence[str], rank: int) -> str | None:
    """Return what to do about the exception that ended a rank, if it may come of that."""
    last = next((line for line in reversed(words) if _EXCEPTION.match(line)), "")
    if _SAYS_ITSELF in last:
        return None
    if _MADE.match(last):
        return _MAKE
    if _HALF.match(last):
        return _WROTE
    return _READ if _MISSING.match(last) and rank else None
