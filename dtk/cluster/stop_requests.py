"""Requests to save and end, for training in a thread, where Python catches no signal.

    dtk run ── the rank's report channel ─────────────> this rank      under `dtk run`, any thread
    SIGTERM ── the main thread, by `forward_sigterm` ─> this rank      in an engine's worker

Elsewhere nothing can ask a thread: a SIGTERM ends the process at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from dtk.cluster import progress, report_channel

_act: Callable[[], None] | None = None
_is_awaiting = False
_forwards = False  # whether `forward_sigterm` has been called


def subscribe(act: Callable[[], None]) -> bool:
    """Have requests act from now on; False where none can come."""
    global _act, _is_awaiting
    if progress.is_launcher_told_of_saving() and not _is_awaiting:
        _is_awaiting = report_channel.can_be_asked()
        if _is_awaiting:
            threading.Thread(target=_await, name="dtk-requests", daemon=True).start()
    if _is_awaiting or _forwards:
        _act = act
    return _act is act


def unsubscribe() -> None:
    """Have requests act no more."""
    global _act
    _act = None


def _await() -> None:
    report_channel.await_request()
    if _act is not None:
        _act()


def forward_sigterm() -> None:
    """Have SIGTERM ask the thread that trains; called in the main thread. Else it acts as before.

    A second one acts as before, too.
    """
    global _forwards
    before = signal.getsignal(signal.SIGTERM)

    def forward(number: int, frame: FrameType | None) -> None:
        if (act := _act) is not None:
            unsubscribe()
            act()
        elif callable(before):
            before(number, frame)
        else:
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
            os.kill(os.getpid(), number)

    if not _forwards:
        signal.signal(signal.SIGTERM, forward)
        _forwards = True


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """Put the system's handler of SIGTERM back: TensorFlow's, set as it starts, does nothing.

    By Python's own functions in C: those of `signal` are for the main thread.
    """
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.restype, put.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    before = get(signal.SIGTERM)
    try:
        yield
    finally:
        put(signal.SIGTERM, before)
