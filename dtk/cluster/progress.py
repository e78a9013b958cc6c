"""What a rank is doing, told to `dtk run`, which ends a job that is stuck and names who is missing.

A rank is *inside* while it computes or waits together with the others: in a step, in a collective.
It counts how often it has gone inside, and a thread of its own reports once a second where it is:

    rank 0   inside train step 42                              waits
    rank 1   outside, after train step 41; no CPU for 300 s    is waited for

A script's own loop says nothing of where it is. There a rank is inside while it waits in a function
of TensorFlow's: it uses no processor, and the messages of its graphs do not go on.

What a rank does alone though it is inside, such as tracing the step, is outside (`alone`). Before
there is a communicator a rank *joins* the others: it waits, too, and often cannot report
meanwhile, since TensorFlow and MPI keep Python's lock while they start.

In jobs with parameter servers the chief is inside while it waits for workers, and says which of
them has work since when; the evaluator is inside while it evaluates; the others only serve.

Under `dtk run` a rank reports from the import of dtk on, elsewhere from the strategy on.

A rank also says what a request to end would lead to: the launcher asks the ranks that are ready,
gives them `save_grace` seconds to begin, and as much again to write. All others it ends at once.

    ready    a SIGTERM would be followed by a checkpoint, when the running step is over
    waits    so would a request by the report channel, and not a SIGTERM: `fit` is in a thread
    begun    all ranks have agreed, and one writes
    over     nothing would be saved any more

Reports go to the launcher by `dtk.cluster.report_channel`. A rank that is stopped, swapped out or
cut off sends none at all.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import gc
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

from dtk.cluster import report_channel, usage
from dtk.cluster.stall import RankReport, is_at_work
from dtk.cluster.variables import SAVE_GRACE
from dtk.errors import ClusterError

# Seconds, of the launcher's: set in ranks that are to report. See `dtk run --stall-timeout`.
VARIABLE = "DTK_STALL_TIMEOUT"
DEFAULT_TIMEOUT = 300.0
TIMEOUTS = "1 to 1000000 seconds, or 0"  # see `is_timeout`
DEFAULT_SAVE_GRACE = 60.0
_PERIOD = 1.0
_AT_LEAST = 5.0
# Shown of a stack: the innermost calls, and the outermost, which are the script's.
_INNER, _OUTER = 8, 10
# A line longer than a pipe takes at once could mix with another.
_LONGEST = 3000
_ANOTHER = "and of a thread that this one waits for:"
# Where TensorFlow calls Python: generators, `tf.py_function` and its like.
_BY_TENSORFLOW = "/tensorflow/python/ops/script_ops.py"
# Where it calls a function of its own, which may wait for other ranks.
_A_FUNCTION = "/tensorflow/python/eager/execute.py"
# Where a checkpoint is written while training goes on, and waited for.
_WRITES = "/dtk/callbacks/checkpointing/contents.py"


class _Position(NamedTuple):
    number: int = 0
    depth: int = 0
    what: str = "the start"
    since: float = 0.0
    alone: bool = False
    joining: bool = False


class _Reporter:
    """Reports the position of the thread that trains: the last to make a strategy or call fit."""

    def __init__(self, timeout: float, send: Callable[[RankReport], object]) -> None:
        self.position = _Position(since=time.monotonic())
        self.held: Callable[[], dict[int, float]] = dict
        self.loops = 0
        self.refused = False
        self.times: collections.Counter[str] = collections.Counter()
        self.serves = False
        self._timeout, self._send = timeout, send
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)  # which finds it held, maybe
        self.thread = threading.current_thread()
        # Seconds that it has computed in looking for messages, and since when it does.
        self.polled = 0.0
        self.polls_since: float | None = None
        # Since when it waits in a function, and what was seen then.
        self._waits_since: float | None = None
        self._seen = (0.0, 0.0, 0)
        threading.Thread(target=self._run, name="dtk-progress", daemon=True).start()
        atexit.register(self.tell)  # the launcher wants to know whether anything was done

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def _run(self) -> None:
        told, when, failed = self.position, 0.0, False
        while True:
            position, now = self.position, time.monotonic()
            try:
                self._look(now)
                if position is not told or now - when >= min(_AT_LEAST, self._timeout / 4):
                    told, when = position, now
                    self.tell()
            except Exception:  # a rank that no longer reports would count as stuck
                if not failed:
                    print("dtk: this rank's report has failed:", file=sys.stderr)
                    traceback.print_exc()
                failed = True
            time.sleep(min(_PERIOD, self._timeout / 10))

    def _look(self, now: float) -> None:
        """Look whether a script's own loop waits for others in a function of TensorFlow's."""
        # A chief says itself which workers it waits for.
        is_chief = self.held is not dict
        elsewhere = self.position.depth or self.position.alone or is_chief
        if elsewhere or not self._calls().endswith(_A_FUNCTION):
            self._waits_since = None
            return
        seen = (now, self._cpu(), _bytes_of_graphs())
        (before, cpu, sent), self._seen = self._seen, seen
        if seen[2] != sent or is_at_work(seen[1] - cpu, 0, now - before):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = now

    def _calls(self) -> str:
        """Return the file of the function that the thread is in."""
        # Before Python 3.12, the collector may run in here and lock up all threads (gh-106883).
        collects = gc.isenabled()
        gc.disable()
        try:
            frame = sys._current_frames().get(self.thread.ident or 0)  # noqa: SLF001
        finally:
            if collects:
                gc.enable()
        return "" if frame is None else frame.f_code.co_filename

    def _cpu(self) -> float:
        """Return the seconds that this process has computed, without its looking for messages."""
        polls, thread = self.polled, self.thread.native_id or 0
        if (since := self.polls_since) is not None:
            polls += max(0.0, usage.cpu(thread) - since)
        return time.process_time() - sum(map(usage.cpu, _polling)) - polls

    def tell(self) -> None:
        """Report now."""
        # Reports leave in the order in which they were true. A signal's handler may report, too.
        with self._lock:
            self._send(self._report(self.position, time.monotonic()))

    def _report(self, position: _Position, now: float) -> RankReport:
        inside, what, still = position.depth > 0, position.what, now - position.since
        if not inside and self._waits_since is not None:
            inside, what = True, f"a function of TensorFlow's, after {what}"
            still = now - self._waits_since
        late = still > self._timeout / 2 and not self.serves
        seconds, moved = usage.of_started(os.getpid())
        thread = self.thread.ident or 0
        stack, feeds = stacks_of_this_process(thread) if late else ("", False)
        return RankReport(
            count=position.number,
            inside=inside,
            alone=position.alone,
            joining=position.joining,
            loops=self.loops,
            batches=_batches_of_steps(),
            refused=self.refused,
            feeds=feeds,
            what=what,
            still=still,
            cpu=self._cpu() + seconds,
            io=usage.io() + moved,
            stack=stack,
            held={str(worker): now - began for worker, began in self.held().items()},
        )

    @contextlib.contextmanager
    def at(self, place: _Position, stays: bool = False, at_once: bool = False) -> Iterator[None]:
        """Return a context in which the thread is at a place."""
        before = self.position
        self.position = place._replace(since=time.monotonic())
        if at_once:
            self.tell()
        try:
            yield
        finally:
            after = place._replace(depth=0) if stays else before
            number = self.position.number
            self.position = after._replace(number=number, since=time.monotonic())


_reporter: _Reporter | None = None
# Threads that ask for messages all the time: they use CPU while a rank waits. System's numbers.
_polling: set[int] = set()


_bytes_of_graphs: Callable[[], int] = int
_batches_of_steps: Callable[[], int] = int


def count_by(bytes_of_graphs: Callable[[], int], batches_of_steps: Callable[[], int]) -> None:
    """Note what counts the bytes that graphs have sent, and the batches that steps have had."""
    global _bytes_of_graphs, _batches_of_steps
    _bytes_of_graphs, _batches_of_steps = bytes_of_graphs, batches_of_steps


def is_timeout(seconds: object) -> bool:
    """Return whether a job may be ended after so many seconds without progress; 0: never."""
    return isinstance(seconds, int | float) and (seconds == 0.0 or 1.0 <= seconds <= 1e6)


def start(serves: bool = False) -> None:
    """Begin to report, once, where the launcher has asked for it; and this thread from now on."""
    timeout = 0.0
    with contextlib.suppress(ValueError):  # which the strategy refuses, by name
        timeout = float(os.environ.get(VARIABLE) or 0)
    if is_task():
        report_channel.keep()
        if _reporter is None and timeout > 0:
            report_to(lambda told: report_channel.tell({"progress": vars(told)}), timeout)
    trains_here()
    if _reporter is not None and serves:  # its main thread only waits for the job's end
        _reporter.serves = True
        _reporter.position = _Position(0, 1, "service", time.monotonic())


def trains_here() -> None:
    """Report from now on where this thread is."""
    if _reporter is not None:
        _reporter.thread = threading.current_thread()


def report_to(send: Callable[[RankReport], object], timeout: float) -> None:
    """Begin to report to others than a launcher."""
    global _reporter
    _reporter = _Reporter(timeout, send)


def is_reporting() -> bool:
    """Return whether this process reports to anyone."""
    return _reporter is not None


def is_launched() -> bool:
    """Return whether `dtk run` has started this process, or one that did, and sees to it."""
    return os.environ.get("DTK_RUN") == "1"


def is_task() -> bool:
    """Return whether `dtk run` has started this very process, and so hears its reports."""
    return is_launched() and os.getsid(0) == os.getpid()


def tell_held(held: Callable[[], dict[int, float]]) -> None:
    """Report from now on which worker has work."""
    if _reporter is not None:
        _reporter.held = held


def _mine() -> _Reporter | None:
    """Return what reports of this thread; None where nothing does."""
    here = threading.current_thread()
    return _reporter if _reporter is not None and here is _reporter.thread else None


def inside(what: str) -> AbstractContextManager[None]:
    """Return a context for what all ranks do together."""
    reporter = _mine()
    if reporter is None:
        return nullcontext()
    number, depth, before, _, is_alone, _ = reporter.position
    reporter.times[what] += 1
    place = _Position(number + 1, depth + 1, f"{what} {reporter.times[what]}")
    # After a step, the collectives of callbacks tell less than the step.
    is_of_callbacks = what == "collective" and " step " in before
    return reporter.at(place, stays=not (depth or is_alone or is_of_callbacks))


def alone(what: str) -> AbstractContextManager[None]:
    """Return a context, inside of another, for what a rank does without the others."""
    reporter = _mine()
    if reporter is None or not reporter.position.depth:
        return nullcontext()
    number, _, where, *_ = reporter.position
    return reporter.at(_Position(number, 0, f"{what} {where}", alone=True))


def joining(what: str) -> AbstractContextManager[None]:
    """Return a context in which this rank waits until the others have started, too."""
    reporter = _mine()
    if reporter is None:
        return nullcontext()
    number, depth, *_ = reporter.position
    # At once: while it waits, it may be unable to.
    return reporter.at(_Position(number, depth, what, joining=True), at_once=True)


@contextlib.contextmanager
def polling() -> Iterator[None]:
    """Return a context in which this thread asks for messages all the time.

    What it uses of the processor does not count as computing.
    """
    if (reporter := _mine()) is None:
        yield
        return
    began = reporter.polls_since = time.thread_time()
    try:
        yield
    finally:
        reporter.polls_since = None
        reporter.polled += time.thread_time() - began


@contextlib.contextmanager
def polling_threads() -> Iterator[None]:
    """Return a context whose new threads ask for messages all the time; see `polling`."""
    before = _threads()
    try:
        yield
    finally:
        _polling.update(_threads() - before)


def _threads() -> set[int]:
    return set(map(int, os.listdir("/proc/self/task")))


def end_of_data() -> None:
    """Note that this rank has come to the end of an epoch's data, or of that of a call."""
    if (reporter := _mine()) is not None:
        reporter.loops += 1
        reporter.tell()


def refused() -> None:
    """Note that others take part in another collective than this rank; who watches may say why."""
    if _reporter is not None:
        _reporter.refused = True
        _reporter.tell()
        time.sleep(_PERIOD)


# What a request to end would lead to.


def save_grace(environ: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds ranks may take to agree on a checkpoint, and to write it."""
    text = environ.get(SAVE_GRACE) or str(DEFAULT_SAVE_GRACE)
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise ClusterError(f"{SAVE_GRACE}={text!r}, expected a positive number of seconds")


def is_launcher_told_of_saving() -> bool:
    """Return whether a launcher reads what `tell_saving` says."""
    return is_launched() and SAVE_GRACE in os.environ


def tell_saving(what: Literal["ready", "waits", "begun", "over"]) -> None:
    """Tell the launcher, if there is one, what a request to end would lead to."""
    if is_launcher_told_of_saving():
        report_channel.tell({"saving": what})


# Stacks as `faulthandler` writes them, shortened to what tells where a script is.


def stacks_of_this_process(thread: int) -> tuple[str, bool]:
    """Return the stack of a thread of this process, and whether TensorFlow waits for Python."""
    # A rank may have no folder for files, or none with room.
    with open(os.memfd_create("dtk-stacks"), "w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        threads = file.read().split("\n\n")
    its = [one for one in threads if f"0x{thread:016x} " in one]
    others = [one for one in threads if one not in its]
    return _with_awaited(its[:1], others), any(_BY_TENSORFLOW in one for one in others)


def stack_of_main_thread(lines: Sequence[str]) -> str:
    """Return the stack of the main thread out of what a process has written when it was aborted.

    >>> stack_of_main_thread(["Fatal Python error: Aborted", "",
    ...     "Thread 0x1 (most recent call first):", '  File "a.py", line 1 in f', "",
    ...     "Current thread 0x2 (most recent call first):",
    ...     '  File "b.py", line 3 in g', "  <no Python frame>", "", "Extension modules: none"])
    '  File "b.py", line 3 in g'
    """
    text = "\n".join(lines)
    threads = [one for one in text.split("\n\n") if "(most recent call first):" in one]
    # It is the oldest, and the last that is written.
    return _with_awaited(threads[-1:], threads[:-1])


def _with_awaited(its: Sequence[str], others: Sequence[str]) -> str:
    """Return the stack of a thread, if there is one, shortened, and of one that it waits for."""
    mark = _WRITES if any(_WRITES in one for one in its) else _BY_TENSORFLOW
    threads = [*its, *[one for one in others if mark in one][:1]]
    stacks = [_calls(one.splitlines(), len(threads)) for one in threads]
    return f"\n{_ANOTHER}\n".join("\n".join(calls) for calls in stacks)[:_LONGEST]


def _calls(lines: Sequence[str], shared_by: int) -> list[str]:
    calls = [line for line in lines if line.startswith("  File ")]
    inner, outer = _INNER // shared_by, _OUTER // shared_by
    if len(calls) <= inner + outer:
        return calls
    return [*calls[:inner], "  ...", *calls[-outer:]]
