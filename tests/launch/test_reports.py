"""What ranks report reaches the launcher, whatever they do to their output."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading

import pytest

from dtk.cluster import report_channel

from support.launched import a_job, ranks, until

pytestmark = pytest.mark.command

TIMEOUT = 2.0
SCRIPT = """
import multiprocessing, os, sys, time
import dtk
from dtk.cluster import progress
rank = int(sys.argv[1])
{before}
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    with progress.inside("train step"):
        time.sleep(0.1)
{after}
"""
WAYS = r"""
def sleep():
    time.sleep(3)
if rank == 0:
    sys.stderr.write("\r 50%|#####     |")  # a progress bar leaves its line open
elif rank == 1:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
elif rank == 2:
    os.close(2)
    os.open(os.devnull, os.O_WRONLY)
elif rank == 3:  # they inherit what is open
    multiprocessing.get_context("fork").Process(target=sleep).start()
    os.system("sleep 600 &")
elif rank == 4:  # what it opens next by the same number holds what the script wrote alone
    os.closerange(3, 256)
    while os.open(os.devnull, os.O_WRONLY) < 40: pass
"""


ENV = {"DTK_RUN": "1", "DTK_STALL_TIMEOUT": f"{TIMEOUT:g}"}


def reporting(count, before="", after="", seconds=2.5 * TIMEOUT, host="localhost"):
    code = SCRIPT.format(before=before, after=after, seconds=seconds)
    return ranks(code, count, host, **ENV)


def test_ranks_are_heard_whatever_becomes_of_their_standard_error(run):
    """A job with tqdm was ended after five minutes: its reports stood behind an open line."""
    code, _, err, _ = run(reporting(5, WAYS), stall_timeout=TIMEOUT)
    assert code == 0
    assert sorted(err.splitlines()) == [
        "[0]  50%|#####     |",
        "dtk run: rank 4 has closed the descriptor of its reports (DTK_REPORTS): if it is stuck, "
        "that is not noticed any more",
    ]


def test_a_rank_that_is_stuck_behind_an_open_line_is_named(run):
    after = "if rank == 1: time.sleep(600)\nwith progress.inside('collective'): time.sleep(600)"
    code, _, err, _ = run(reporting(2, WAYS, after, seconds=1.0), stall_timeout=TIMEOUT)
    assert code == 124
    assert "rank 1, host localhost, did nothing for 2 s after train step " in err
    assert "computed without" not in err
    assert err.rstrip().splitlines()[-1] == "rank 0 waits in collective 1."


SLEEPS_EARLY = """
import sys, time
def sleeps():
    time.sleep(600)
if sys.argv[1] == "1": sleeps()
import dtk
from dtk.cluster import progress
with progress.joining("the start of all"): time.sleep(600)
"""


def test_a_rank_that_sleeps_before_it_reports_is_named_with_its_stack(run):
    """It is seen from outside, and made to say where it is."""
    processes = ranks(SLEEPS_EARLY, **ENV, PYTHONFAULTHANDLER="1")
    code, _, err, _ = run(processes, stall_timeout=TIMEOUT)
    assert code == 124
    first, its, *stack, last = err.strip().splitlines()[1:]
    assert first == "rank 1, host localhost, did nothing for 2 s before it made a strategy."
    assert its == "Its stack, the innermost call first:"
    assert stack[0] == '  File "<string>", line 4 in sleeps'
    assert last == "rank 0 waits in the start of all."


def test_a_job_whose_errors_nobody_reads_can_be_stopped_while_a_rank_computes_alone():
    """The word about that rank was written while the lock was held that a stop needs."""
    after = "if rank == 1:\n    while True: pass\nwith progress.inside('c'): time.sleep(600)"
    read, write = os.pipe()
    os.set_blocking(write, False)
    while True:
        try:
            os.write(write, b"x" * 4096)
        except BlockingIOError:
            break
    os.set_blocking(write, True)
    options = {"stdout": io.StringIO(), "grace": 1.0, "stall_timeout": TIMEOUT}
    with (
        os.fdopen(write, "w") as full,
        a_job(reporting(2, after=after, seconds=0.5), stderr=full, **options) as job,
    ):
        waiting = threading.Thread(target=job.wait)
        waiting.start()
        until(lambda: job._output._sinks[1].waited)
        job.stop()
        waiting.join(30)
        assert not waiting.is_alive()
        os.close(read)


def test_reports_of_another_host_are_cut_out_of_an_open_line(run, shell):
    before = "sys.stderr.write('\\r 50%|#####     |')"
    after = "sys.stderr.write('\\r100%|##########|\\n')"
    processes = reporting(1, before, after, seconds=2.0, host="elsewhere.invalid")
    code, _, err, _ = run(processes, stall_timeout=TIMEOUT, remote_shell=shell)
    assert (code, err) == (0, "[0] 100%|##########|\n")


@pytest.mark.parametrize("size", range(1, 12))
def test_records_are_cut_wherever_reads_tear_them(size):
    wrote = b"50%" + report_channel.record(b'{"saving": "ready"}') + b"\x1e|\n"
    text, records, rest = b"", [], b""
    for begin in range(0, len(wrote), size):
        shown, found, rest = report_channel.split_records(rest + wrote[begin : begin + size])
        text, records = text + shown, records + found
    assert (text + rest, records) == (b"50%\x1e|\n", [b'{"saving": "ready"}'])


def test_a_socket_that_has_the_number_of_an_end_that_was_closed_is_left_alone():
    reading, own = report_channel.pair()
    with reading, own:
        place = f"{own.fileno()}:{os.fstat(own.fileno()).st_ino + 1}"
        code = "from dtk.cluster import report_channel; report_channel.tell({'a': 1})"
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, report_channel.VARIABLE: place},
            pass_fds=[own.fileno()],
            start_new_session=True,  # as a rank is
            check=True,
        )
        own.close()
        assert report_channel.receive(reading) == b""


@pytest.mark.parametrize("is_read", [True, False])
def test_a_report_is_taken_where_somebody_reads(is_read):
    """Steps whose event was not taken are told with the next ones."""
    reading, own = report_channel.pair()
    with reading, own:
        if not is_read:
            reading.close()
        code = "from dtk.cluster import report_channel as to; print(to.tell({'a': 1}))"
        told = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **report_channel.variables(own)},
            pass_fds=[own.fileno()],
            start_new_session=True,
            check=True,
            capture_output=True,
            text=True,
        )
        assert told.stdout == f"{is_read}\n"


@pytest.mark.full("ranks that are lost end a job as in other tests of this folder")
def test_ranks_that_wait_for_a_reader_are_not_stuck():
    """As behind a pager, or a terminal after Ctrl-S: the launcher ended the job."""
    before = (
        "if rank == 1:\n    while True: print('a' * 99)\n"
        "with progress.inside('collective'): time.sleep(600)"
    )
    read, write = os.pipe()
    with (
        open(write, "w") as out,
        a_job(reporting(2, before), stdout=out, stderr=io.StringIO(), stall_timeout=TIMEOUT) as job,
        pytest.raises(TimeoutError, match="still running: rank 0, rank 1"),
    ):
        job.wait(timeout=3 * TIMEOUT)
    assert job.wait(timeout=0) == 143
    os.close(read)


LOOKS = """
import gc, sys, threading
from dtk.cluster.progress import _Reporter
looks = object.__new__(_Reporter)
looks.thread = threading.main_thread()
inside = set()
def note(*_):
    frame = sys._getframe().f_back
    inside.add(frame.f_code.co_name if frame else None)
gc.callbacks.append(note)
gc.set_threshold(1)  # as good as every new object collects
while not inside:
    looks._calls(), [[]]
del gc.callbacks[:]
assert inside == {"<module>"}, inside
"""


def test_no_collection_runs_while_the_main_thread_s_place_is_read():
    """CPython 3.11 can lock up all threads if one does."""
    subprocess.run([sys.executable, "-c", LOOKS], check=True, timeout=60)
