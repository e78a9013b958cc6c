"""Requests to save and end, for training in a thread, where Python catches no signal.

    dtk run ── the rank's report channel ─────────────> this rank      under `dtk run`, any thread
    SIGTERM ── the main thread, by `forward_sigterm` ─> this rank      in an engine's worker

Elsewhere nothing can ask a thread: a SIGTERM ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from dtk.cluster import progress, report_channel

_act: Callable[[], None] | None = None
_is_awaiting = _is_forwarding = False


def subscribe(act: Callable[[], None]) -> bool:
    """Have requests act from now on; False where none can come."""
    global _act, _is_awaiting
    if progress.is_launcher_told_of_saving() and not _is_awaiting:
        _is_awaiting = report_channel.can_be_asked()
        if _is_awaiting:
            threading.Thread(target=_await, name="dtk-requests", daemon=True).start()
    if _is_awaiting or _is_forwarding:
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
    global _is_forwarding
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

    if not _is_forwarding:
        signal.signal(signal.SIGTERM, forward)
        _is_forwarding = True
