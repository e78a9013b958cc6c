"""Python stacks as `faulthandler` writes them, shortened to what tells where a script is."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from collections.abc import Sequence

# Shown of a stack: the innermost calls, and the outermost, which are the script's.
_INNER, _OUTER = 8, 10
# A line longer than a pipe takes at once could mix with another.
_LONGEST = 3000
_ANOTHER = "and of a thread that this one waits for:"
# Where TensorFlow calls Python: generators, `tf.py_function` and its like.
_BY_TENSORFLOW = "/tensorflow/python/ops/script_ops.py"

# Where a checkpoint is written while training goes on.
_WRITES = "/dtk/callbacks/checkpointing/background.py"


def of_this_process(main: int, awaited: threading.Thread | None) -> tuple[str, bool]:
    """Return the stacks of this process, and whether TensorFlow waits for Python."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        threads = file.read().split("\n\n")
    ids = [main] if awaited is None or not awaited.ident else [main, awaited.ident]
    its = [one for ident in ids for one in threads if f"0x{ident:016x} " in one]
    feeding = [one for one in threads if _BY_TENSORFLOW in one and one not in its]
    return _shortened([*its[:1], *feeding[:1], *its[1:]]), bool(feeding)


def of_main_thread(lines: Sequence[str]) -> str:
    """Return the stack of the main thread out of what a process has written when it was aborted.

    >>> of_main_thread(["Fatal Python error: Aborted", "", "Thread 0x1 (most recent call first):",
    ...     '  File "a.py", line 1 in f', "", "Current thread 0x2 (most recent call first):",
    ...     '  File "b.py", line 3 in g', "  <no Python frame>", "", "Extension modules: none"])
    '  File "b.py", line 3 in g'
    """
    text = "\n".join(lines)
    threads = [one for one in text.split("\n\n") if "(most recent call first):" in one]
    # It is the oldest, and the last that is written.
    others = [one for one in threads[:-1] if _BY_TENSORFLOW in one or _WRITES in one]
    return _shortened([*threads[-1:], *others[:1]])


def _shortened(threads: Sequence[str]) -> str:
    """Return the stacks of a thread, and of those that it waits for."""
    found = [_calls(one.splitlines(), len(threads)) for one in threads]
    return f"\n{_ANOTHER}\n".join("\n".join(calls) for calls in found)[:_LONGEST]


def _calls(lines: Sequence[str], shared_by: int) -> list[str]:
    calls = [line for line in lines if line.startswith("  File ")]
    inner, outer = _INNER // shared_by, _OUTER // shared_by
    if len(calls) <= inner + outer:
        return calls
    return [*calls[:inner], "  ...", *calls[-outer:]]
