"""What ranks report reaches the launcher, whatever they do to their output."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time

import pytest

from dtk.cluster import report_channel
from dtk.cluster.rank_status import RankStatus
from dtk.cluster.usage import Usage
from dtk.launch import Job
from dtk.launch.plan import Process

TIMEOUT = 3.0
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
"""


def ranks(count, before="", after="", seconds=2.5 * TIMEOUT, host="localhost"):
    code = SCRIPT.format(before=before, after=after, seconds=seconds)
    env = {"DTK_RUN": "1", "DTK_STALL_TIMEOUT": f"{TIMEOUT:g}"}
    return [
        Process(f"rank {r}", "worker", r, host, (sys.executable, "-c", code, str(r)), env)
        for r in range(count)
    ]


def test_ranks_are_heard_whatever_becomes_of_their_standard_error(run):
    """A job with tqdm was ended after five minutes: its reports stood behind an open line."""
    code, _, err, _ = run(ranks(4, WAYS), stall_timeout=TIMEOUT)
    assert (code, err) == (0, "[0]  50%|#####     |\n")


def test_a_rank_that_is_stuck_behind_an_open_line_is_named(run):
    after = "if rank == 1: time.sleep(600)\nwith progress.inside('collective'): time.sleep(600)"
    code, _, err, _ = run(ranks(2, WAYS, after, seconds=1.0), stall_timeout=TIMEOUT)
    assert code == 124
    assert "rank 1, host localhost, did nothing for 3 s after train step " in err
    assert "computed without" not in err
    assert err.rstrip().splitlines()[-1] == "rank 0 waits in collective 1."


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
    with (
        os.fdopen(write, "w") as full,
        Job(
            ranks(2, after=after, seconds=0.5),
            stdout=io.StringIO(),
            stderr=full,
            grace=1.0,
            stall_timeout=TIMEOUT,
        ) as job,
    ):
        waiting = threading.Thread(target=job.wait)
        waiting.start()
        time.sleep(2.5 * TIMEOUT)
        job.stop()
        waiting.join(30)
        assert not waiting.is_alive()
        os.close(read)


def test_a_rank_that_closes_every_descriptor_goes_on_unwatched(run):
    """And what it opens next by the same number holds what the script wrote alone."""
    before = "os.closerange(3, 256)\nwhile os.open(os.devnull, os.O_WRONLY) < 40: pass"
    code, _, err, _ = run(ranks(1, before, seconds=2.5 * TIMEOUT), stall_timeout=TIMEOUT)
    assert code == 0
    assert err == (
        "dtk run: rank 0 has closed the descriptor of its reports (DTK_REPORTS): if it is stuck, "
        "that is not noticed any more\n"
    )


def test_reports_of_another_host_are_cut_out_of_an_open_line(run, tmp_path):
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nshift\nexec sh -c "$1"\n')
    shell.chmod(0o755)
    before = "sys.stderr.write('\\r 50%|#####     |')"
    code, _, err, _ = run(
        ranks(
            1,
            before,
            "sys.stderr.write('\\r100%|##########|\\n')",
            seconds=2.0,
            host="elsewhere.invalid",
        ),
        stall_timeout=TIMEOUT,
        remote_shell=str(shell),
    )
    assert (code, err) == (0, "[0] 100%|##########|\n")


def test_a_rank_of_which_any_thread_computes_is_not_stopped():
    report = {"count": 1, "inside": True, "what": "train step 1", "still": 0.0, "alone": False}
    report |= {"joining": False, "loops": 0, "feeds": False, "refused": False}
    report |= {"cpu": 0.0, "io": 0, "stack": "", "held": {}}
    rank = RankStatus(heard=0.0, last=report)
    for seconds, total in ((0.0, 5.0), (50.0, 9.0)):
        rank.observe(Usage("S", 1.0, 0, total), seconds)
    assert not rank.is_silent(since=40.0)
    assert rank.is_silent(since=60.0)


def test_reports_that_are_read_late_and_together_are_no_work():
    """A launcher on a busy machine said of a rank that slept that it computed."""
    report = {"count": 1, "inside": False, "what": "train step 1", "still": 0.0, "alone": False}
    report |= {"joining": False, "loops": 0, "feeds": False, "refused": False}
    report |= {"cpu": 0.0, "io": 0, "stack": "", "held": {}}
    rank = RankStatus()
    for seconds, cpu in ((0.0, 0.0), (50.0, 0.01), (50.001, 0.02)):
        rank.take({**report, "cpu": cpu}, seconds)
    assert rank.is_idle(since=1.0)
    rank.take({**report, "cpu": 0.9}, 51.0)
    assert not rank.is_idle(since=1.0)


@pytest.mark.parametrize("size", range(1, 12))
def test_records_are_cut_wherever_reads_tear_them(size):
    wrote = b"50%" + report_channel.record(b'{"saving": "ready"}') + b"\x1e|\n"
    text, records, rest = b"", [], b""
    for begin in range(0, len(wrote), size):
        shown, found, rest = report_channel.cut(rest + wrote[begin : begin + size])
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


def test_ranks_that_wait_for_a_reader_are_not_stuck():
    """As behind a pager, or a terminal after Ctrl-S: the launcher ended the job."""
    before = (
        "if rank == 1:\n    while True: print('a' * 99)\n"
        "with progress.inside('collective'): time.sleep(600)"
    )
    read, write = os.pipe()
    with (
        open(write, "w") as out,
        Job(ranks(2, before), stdout=out, stderr=io.StringIO(), stall_timeout=TIMEOUT) as job,
        pytest.raises(TimeoutError, match="still running: rank 0, rank 1"),
    ):
        job.wait(timeout=3 * TIMEOUT)
    assert job.wait(timeout=0) == 143
    os.close(read)
