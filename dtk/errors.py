"""Errors that dtk raises: each says what was given, what was expected and what to do next.

Each class also derives from the matching built-in error, so `except ValueError` keeps working:

    >>> issubclass(ClusterError, ValueError)
    True
"""

import contextlib
import inspect
import math
import numbers
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

# TensorFlow's, where another rank is gone or cut off; by name, without importing it.
_LOST = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError")
# What dtk says of that, over MPI.
OTHER_IS_GONE = "another rank is gone; see what"
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
    options: dict[Path, str] = {}  # by the file of each
    for option, file in files.items():
        path, why = Path(os.devnull if file is None else str(file)), ""
        other = options.setdefault(path.resolve(), option)
        if file == "":
            why = " is empty; name a file"
        elif path.is_dir():
            why = f" is a directory; name a file, e.g. `{path / 'file'}`"
        elif not path.parent.is_dir():
            why = f": there is no directory {path.parent}; make it first"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = ": this user may not write there; name another file"
        elif other != option and (path.is_file() or not path.exists()):
            why = f" is the file of {other} already; name another"
        if why:
            raise UnwritableError(f"{option} {file}".rstrip() + why)


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
    # Of a step's graph TensorFlow makes an UnknownError of it.
    lost = lost or OTHER_IS_GONE in _said(error)
    return TRY_AGAIN if lost or getattr(error, "passing", False) else 1


# The record of an exception that ends a rank. Python loads this file by its path for it, where the
# script has not imported dtk: see `dtk.launch.bootstrap`.

# What exceptions, and libraries in C++, say when the connection to another rank breaks.
PEER_LOST = re.compile(
    r"Socket closed|Connection reset by peer|[Cc]onnection closed by peer|UnavailableError|"
    r"HorovodInternalError|Horovod has been shut down|"
    r"An error occurred in PMIx Event Notification|"  # MPI's server is gone
    r"whose script has ended; see what|" + OTHER_IS_GONE  # dtk's own, over MPI
)
# Characters: of a message, and of the first and last parts of a traceback that is longer.
_MESSAGE, _HEAD, _TAIL = 300, 3000, 6000
_GENERATED = "__autograph_generated_file"  # TensorFlow's, of a function that stands in the script
_PIECE = 600  # that a report shorter than PIPE_BUF holds in any alphabet


def failure_record(error: BaseException) -> dict[str, object]:
    """Return what others are told of an exception that ends this rank; see `cluster.failures`."""
    message = _said(error)
    file, line = _place_in_script(error)
    return {
        "time": time.monotonic(),
        "error": type(error).__name__,
        "message": message if len(message) <= _MESSAGE else f"{message[:_MESSAGE]} ...",
        "file": file[-_MESSAGE:],
        "line": line,
        "lost_peer": _is_of_lost_peer(error),
    }


def traceback_pieces(error: BaseException) -> list[str]:
    """Return the traceback of an exception in pieces, each short enough for one report."""
    text = "".join(traceback.format_exception(error))
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]}\n...\n{text[-_TAIL:]}"
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]


def _place_in_script(error: BaseException) -> tuple[str, int]:
    """Return file and line of the script's innermost call; "" and 0 where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        places = [(error.filename, error.lineno or 0)]
    else:
        calls = traceback.walk_tb(error.__traceback__)
        places = [(frame.f_code.co_filename, line) for frame, line in calls]
    own = [place for place in places if not is_of_library(place[0]) and _GENERATED not in place[0]]
    file, line = (own or places or [("", 0)])[-1]
    with contextlib.suppress(OSError):  # the working directory may be gone
        short = os.path.relpath(file) if os.path.isabs(file) else file
        file = file if short.startswith("..") else short
    return file, line


def _said(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:  # noqa: BLE001 - of a class of the script's; it is being told of already
        return "(it has no text)"


def _is_of_lost_peer(error: BaseException) -> bool:
    """Return whether an exception, or what has led to it, says that another rank is gone."""
    return any(PEER_LOST.search(f"{type(one).__name__}: {_said(one)}") for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


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
