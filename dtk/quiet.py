"""Keep TensorFlow's start-up notes off the screen, and everything else on it.

TensorFlow obeys TF_CPP_MIN_LOG_LEVEL only after its import: earlier messages go to standard error
at any level (tensorflow #100442), and without a GPU the start of devices logs an error that means
nothing. So at those two moments only, file descriptor 2 leads through a small process that leaves
out the lines below the level:

    C++ and Python --fd 2--> pipe --> helper: is_noise? --> the real standard error

The helper is a process, not a thread, because C++ holds the interpreter lock while it writes, and
because the helper still passes on the rest of the pipe if this process aborts.

The level is the user's, or 2: `TF_CPP_MIN_LOG_LEVEL=0` shows everything. If dtk is imported after
TensorFlow, it cannot silence TensorFlow's import any more.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

DEFAULT_LEVEL = "2"

_PREAMBLE = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
# Lines that LiteRT's interpreter and converter print for every model, at any level.
_LITERT = re.compile(r"INFO: Created TensorFlow Lite XNNPACK delegate|fully_quantize: \d, ")
# By C++: the lines of Python's absl, which a script may print, look the same but for the file.
_LOGGED = re.compile(r"([IWE])\d{4} \d\d:\d\d:\d+\.\d+ +\d+ [\w./-]+\.(cc|h|cpp|hpp|cu):\d+\] ")
_NO_GPU = re.compile(r".*failed call to cuInit: .*(CUDA_ERROR_NO_DEVICE|\(303\))")
# Printed once for integers and booleans, which oneDNN supports on no processor.
_NOT_ONEDNN = re.compile(r".*oneDNN supports DT_U?(BOOL|INT\d+) only on platforms with AVX-512")
# Printed by a chief, whose own GPUs are hidden, for every graph that runs on a worker's.
_OTHERS_GPU = re.compile(r".*NOT_FOUND: TensorFlow device GPU:\d+ was not registered")
# Printed where TensorFlow itself makes a parallel map an ordinary one, see `drawn_in_order`.
_COPIED_ATTRIBUTE = re.compile(r".*attribute use_unbounded_threadpool which is not in the op ")
_LEVELS = {"I": 1, "W": 2, "E": 3}

_GPU_DEVICE = "/dev/nvidiactl"
_READY = b"r"
_END = b"\0dtk.quiet: end\0"
_REAP_SECONDS = 0.5

# One filter at a time: two threads could restore file descriptor 2 in the wrong order.
_filtering = threading.Lock()


def is_noise(line: str, level: str | None, gpu: bool | None = None) -> bool:
    """Return whether a line of standard error is TensorFlow's start-up noise.

    Errors stay, with four exceptions: CUDA's that there is no GPU, on a host without one, oneDNN's
    about types that it supports on no processor, that a worker's GPU is not here, and that an
    attribute of a map was copied.

    >>> is_noise("I0000 00:00:17952.07  13725 port.cc:153] oneDNN custom operations are on.", "2")
    True
    >>> is_noise("ValueError: boom", "2")
    False
    """
    if level not in ("1", "2", "3"):
        return False
    if line == _PREAMBLE or _LITERT.match(line):
        return True
    match = _LOGGED.match(line)
    if match is None:
        return False
    never = (_NOT_ONEDNN, _OTHERS_GPU, _COPIED_ATTRIBUTE)
    if any(one.match(line) for one in never) or _LEVELS[match[1]] <= int(level):
        return True
    gpu = os.path.exists(_GPU_DEVICE) if gpu is None else gpu
    return not gpu and _NO_GPU.match(line) is not None


# In the process that imports TensorFlow.


def device_start() -> contextlib.AbstractContextManager[None]:
    """Filter standard error while TensorFlow starts its devices on a host without GPUs."""
    return contextlib.nullcontext() if os.path.exists(_GPU_DEVICE) else filtered()


@contextlib.contextmanager
def filtered() -> Iterator[None]:
    """Leave TensorFlow's noise out of the block's output to file descriptor 2.

    All other output arrives in order before the block ends, even if the block raises or the process
    ends inside it.
    """
    level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", DEFAULT_LEVEL)
    if level not in ("1", "2", "3") or not _filtering.acquire(blocking=False):
        yield
        return
    try:
        with _led_through_helper(level):
            yield
    finally:
        _filtering.release()


@contextlib.contextmanager
def _led_through_helper(level: str) -> Iterator[None]:
    """Lead file descriptor 2 through a helper in the block; change nothing if none can run."""
    import subprocess  # here: the helper starts quicker without it

    with contextlib.ExitStack() as held:
        answers = None
        # There may be no standard error, no interpreter, or no descriptors left.
        with contextlib.suppress(OSError, TypeError):
            stderr = os.dup(2)
            held.callback(os.close, stderr)
            command = [sys.executable, "-I", "-S", __file__, level]
            helper = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert helper.stdin is not None and helper.stdout is not None
            held.callback(_reap, helper)
            pipe, answers = map(held.enter_context, (helper.stdin, helper.stdout))
        if answers is None or answers.read(1) != _READY:
            yield
            return
        _flush()
        os.dup2(pipe.fileno(), 2)
        try:
            yield
        finally:
            _flush()
            os.dup2(stderr, 2)
            with contextlib.suppress(OSError):
                pipe.write(_END)
                answers.read(1)  # it closes them once it has passed everything on


def _reap(helper: subprocess.Popen[bytes]) -> None:
    """Wait for the helper's end: while a program from the block holds its pipe, it goes on."""
    with contextlib.suppress(Exception):
        helper.wait(_REAP_SECONDS)


def _flush() -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.flush()


# In the helper.


def _pass_on(level: str) -> None:
    """Copy standard input to standard error without the noise, until the pipe is closed."""
    # A signal that ends its parent must not end it before the last output.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    gpu = os.path.exists(_GPU_DEVICE)
    os.write(1, _READY)
    rest, ended = b"", False
    while chunk := os.read(0, 1 << 16):
        rest += chunk
        if not ended and _END in rest:
            rest, _, after = rest.partition(_END)
            _write(rest, level, gpu)
            os.close(1)
            rest, ended = after, True
        whole, newline, rest = rest.rpartition(b"\n")
        _write(whole + newline, "0" if ended else level, gpu)
    _write(rest, "0" if ended else level, gpu)


def _write(text: bytes, level: str, gpu: bool) -> None:
    left = memoryview(
        b"".join(
            line
            for line in text.splitlines(keepends=True)
            if not is_noise(line.decode(errors="replace").rstrip("\r\n"), level, gpu)
        )
    )
    while left:
        try:
            left = left[os.write(2, left) :]
        except BlockingIOError:  # the terminal may be non-blocking
            time.sleep(0.01)


if __name__ == "__main__":
    _pass_on(sys.argv[1])
