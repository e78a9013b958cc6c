"""Telling a job that is stuck from one that is slow: by what is known, and with real ranks."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.cluster import progress, usage
from dtk.cluster.stall import (
    ALONE,
    RankReport,
    RankStatus,
    describe,
    find,
    find_cut_off,
    find_replaceable,
    find_served,
    find_short,
)
from dtk.cluster.usage import Usage

from support.launched import a_job, ranks, until

pytestmark = pytest.mark.command

TIMEOUT = 100.0
NOW = 1e4


def status(still, inside, count=5, what="train step 5", heard=0.0, busy=1000.0, left=False, **more):
    """A rank of which all times are seconds ago."""
    report = RankReport(count=count, inside=bool(inside), what=what, still=still, **more)
    times = {"heard": NOW - heard, "moved": NOW - still, "busy": NOW - busy}
    return RankStatus(**times, last=report, left=left)


def unseen(since=500, ran=500):
    """A rank that was started, and has reported nothing yet."""
    return RankStatus(started=True, moved=NOW - since, ran=NOW - ran)


def joining(still, **more):
    return status(still, inside=False, what="the start of mpi", joining=True, **more)


def stopped(rank, since):
    """A rank of which is seen from outside that a signal has stopped it."""
    rank.seen, rank.ran = (Usage("T", 1.0, 0), NOW), NOW - since
    return rank


def computing(rank):
    """A rank that is seen computing from outside."""
    rank.observe(Usage("R", 1.0, 0), NOW - 9)
    rank.observe(Usage("R", 4.0, 0), NOW - 5)
    return rank


def found(*statuses, timeout=TIMEOUT):
    return find(statuses, now=NOW, timeout=timeout)


def described(stall, *ranks):
    for index, rank in enumerate(ranks):
        rank.name, rank.host = f"rank {index}", "ab"[index]
    return describe(stall, ranks)


LONG = ALONE * TIMEOUT
WAITS = status(150, True)
# What is known of the ranks, which of them are missing, and why.
STALLS = {
    "outside, idle": ([WAITS, status(151, False)], (1,), "did nothing for 100 s"),
    # It had been waited for as long as it used its processor.
    "looping for ever": (
        [status(LONG + 1, True), status(LONG + 9, False, busy=1)],
        (1,),
        "computed without the others for 1200 s,",
    ),
    # such as in a filter that lets nothing through, or beside a thread of the script's
    "looping for ever inside": (
        [status(LONG + 1, True, busy=LONG + 1), status(LONG + 9, True, busy=1)],
        (1,),
        "computed without the others for 1200 s,",
    ),
    "script over": ([WAITS, status(900, False, left=True)], (1,), "has left its script"),
    "data over": (
        [status(150, True, 8, "train step 8"), status(150, True, 9, "collective 1", loops=1)],
        (1,),
        "has come to the end of its data before the others, and waits",
    ),
    # for seconds only: others have the batch of a step that this one never had
    "data over, a moment ago": (
        [status(6, True, 8, batches=8, busy=6), status(6, True, 9, loops=1, batches=7, busy=6)],
        (1,),
        "has come to the end of its data before the others, and waits",
    ),
    "data over, beside a thread that computes": (
        [status(150, True, 8, batches=8, busy=1), status(150, True, 9, loops=1, batches=7)],
        (1,),
        "has come to the end of its data before the others, and waits",
    ),
    "generator": (
        [WAITS, status(150, True, feeds=True)],
        (1,),
        "got no data for 100 s from Python",
    ),
    # whatever it did before
    "silent": (
        [WAITS, status(150, True, heard=120, busy=110), status(1, False)],
        (1,),
        "reported nothing for 100 s, last",
    ),
    "in different places": (
        [status(150, True, 8, "train step 8"), status(150, True, 9, "collective 1")],
        (),
        "Ranks wait for each other in different places, as where the data of one ends earlier",
    ),
    "nobody": ([WAITS, WAITS], (), "No rank did anything for 100 s"),
    "unseen": ([joining(150), unseen()], (1,), "did nothing for 100 s"),
    "unseen, where nobody looks": ([joining(150), unseen(ran=inf)], (1,), "did nothing for 100 s"),
    "at its start": ([joining(150), status(151, False)], (1,), "did nothing for 100 s"),
    # TensorFlow and MPI keep Python's lock while they wait.
    "unseen, of one that cannot report": (
        [joining(150, heard=150), unseen()],
        (1,),
        "did nothing for 100 s",
    ),
    "stopped while it may be silent": (
        [joining(150, heard=150), stopped(joining(150, heard=150), 150)],
        (1,),
        "reported nothing for 100 s, last",
    ),
    "stopped for long": (
        [WAITS, stopped(status(152, False, heard=101), 101)],
        (1,),
        "reported nothing for 100 s, last",
    ),
}


@pytest.mark.parametrize(("ranks", "missing", "why"), STALLS.values(), ids=STALLS)
def test_who_is_missing_and_why(ranks, missing, why):
    stall = found(*ranks)
    waiting = tuple(index for index in range(len(ranks)) if index not in missing)
    assert stall == (missing, why, waiting)


NONE = {
    "not for long enough": [status(90, True), status(91, False)],
    "computing, or reading and writing": [WAITS, status(151, False, busy=20)],
    "a slow step": [WAITS, status(150, True, busy=20)],
    "nobody waits for anybody": [status(150, False), status(150, False)],
    "not all have begun": [WAITS, RankStatus()],
    "one moves": [WAITS, status(20, False)],
    "a loop that may end": [status(LONG - 1, True), status(LONG + 9, False, busy=1)],
    "a loop that ended": [status(LONG + 1, True), status(20, False, busy=1)],
    # All inside, such as in a step that is one epoch long: nobody waits for a rank outside.
    "a long step": [status(LONG + 1, True, busy=1)] * 2,
    "a slow part of a step, for less": [
        status(LONG + 1, True, busy=LONG - 1),
        status(LONG + 9, True, busy=1),
    ],
    "computing at its start": [joining(150), unseen(ran=20)],
    "just started": [joining(150), unseen(since=20)],
    "none has begun": [unseen(), unseen()],
    "joining": [joining(150, heard=150), joining(20)],
    # It will be silent in a moment, and its last report is out of date.
    "stopped a moment ago": [WAITS, stopped(status(150, False, heard=99), 99)],
    "computing, and unable to say so": [WAITS, computing(status(1, False, heard=120))],
    "nobody waits for one that left": [status(150, False), status(900, False, left=True)],
    "the last batch on its way": [
        status(90, True, batches=7),
        status(90, True, loops=1, batches=7),
    ],
    "an evaluation of one rank alone": [
        status(90, True, batches=7),
        status(90, True, loops=1, batches=9),
    ],
    "computing with a batch of its own": [
        status(90, True, batches=8, busy=1),
        status(90, True, loops=1, batches=7),
    ],
    "a generator that computes": [WAITS, status(150, True, feeds=True, busy=20)],
}


@pytest.mark.parametrize("ranks", NONE.values(), ids=NONE)
def test_what_is_no_stall(ranks):
    assert found(*ranks) is None


def test_nobody_waits_five_minutes_for_a_rank_whose_script_is_over():
    left, waits = status(900, inside=False, left=True), status(61, inside=True)
    stall = found(waits, left, timeout=300.0)
    assert stall.missing == (1,)
    told = described(stall, waits, left)
    assert "rank 1, host b, has left its script after train step 5, and every rank must run" in told
    assert found(status(61, True, busy=50), left, timeout=300.0) is None
    assert found(waits, status(61, inside=False), left, timeout=300.0) is None


def test_what_is_said_of_a_stall():
    ranks = [joining(150, heard=150), stopped(joining(150, heard=150), 150)]
    assert described(found(*ranks), *ranks) == (
        "\ndtk: the job has stopped moving, and was ended.\n"
        "rank 1, host b, reported nothing for 100 s, last in the start of mpi. "
        "It is stopped, as by SIGSTOP.\nrank 0 waits in the start of mpi.\n"
    )
    ranks = [WAITS, status(150, False, what="the Python of train step 1", alone=True)]
    told = described(found(*ranks), *ranks)
    assert "rank 1, host b, did nothing for 100 s in the Python of train step 1." in told


def test_a_rank_that_has_failed_of_shorter_data_of_another():
    """MPI notices at once that ranks are in different collectives, and not which is wrong."""
    ranks = [status(1, True, refused=True), status(1, True, loops=1)]
    assert find_short(ranks).missing == (1,)
    assert find_short([status(1, True), status(1, True, loops=1)]) is None
    assert find_short([status(1, True, refused=True), status(1, True)]) is None


RANKS = st.lists(
    st.builds(
        status,
        still=st.floats(0, 300),
        inside=st.booleans(),
        count=st.integers(1, 3),
        heard=st.floats(0, 90),
        busy=st.floats(0, 300),
    ),
    min_size=2,
    max_size=5,
)


@given(RANKS)
def test_a_job_in_which_anything_moves_or_works_where_it_is_waited_for_goes_on(ranks):
    stall = found(*ranks)
    moved = any(NOW - rank.moved < TIMEOUT for rank in ranks)
    waited_for = [rank for rank in ranks if not rank.last.inside] or ranks
    working = all(NOW - rank.busy < TIMEOUT for rank in waited_for)
    if moved or working:
        assert stall is None
    if stall is not None:
        assert stall.missing or stall.waiting
        assert all(NOW - ranks[i].busy >= TIMEOUT for i in stall.missing)
        assert not any(ranks[i].last.inside for i in stall.missing)


def test_reports_tell_work_from_waiting():
    rank = RankStatus()
    rank.take(RankReport(cpu=1.0), now=10.0)
    rank.take(RankReport(cpu=1.01, still=1.0), now=11.0)
    assert rank.busy == rank.moved == 10.0
    rank.take(RankReport(cpu=1.2, still=2.0), now=12.0)
    assert rank.busy == 12.0
    rank.take(RankReport(cpu=1.2, io=1_000_000, still=3.0), now=13.0)
    assert rank.busy == 13.0


def test_reports_that_are_read_late_and_together_are_no_work():
    """A launcher on a busy machine said of a rank that slept that it computed."""
    rank = RankStatus()
    for seconds, cpu in ((0.0, 0.0), (50.0, 0.01), (50.001, 0.02)):
        rank.take(RankReport(count=1, cpu=cpu), seconds)
    assert rank.is_idle(since=1.0)
    rank.take(RankReport(count=1, cpu=0.9), 51.0)
    assert not rank.is_idle(since=1.0)


def test_a_rank_of_which_any_thread_computes_is_not_stopped():
    rank = RankStatus(heard=0.0, last=RankReport(count=1, inside=True))
    for seconds, total in ((0.0, 5.0), (50.0, 9.0)):
        rank.observe(Usage("S", 1.0, 0, total), seconds)
    assert not rank.is_silent(since=40.0)
    assert rank.is_silent(since=60.0)


def test_a_rank_works_while_a_program_that_it_has_started_does():
    """Breaks as the end of a job whose rank 0 unpacks the data by `tar`."""
    command = ["sh", "-c", f"'{sys.executable}' -c 'while True: pass'; true"]
    with subprocess.Popen(command, start_new_session=True) as started:
        try:
            until(lambda: usage.usage_of(started.pid).cpu > 0.3)  # the shell itself only waits
        finally:
            os.killpg(started.pid, signal.SIGKILL)


def test_a_silent_rank_is_what_others_have_lost():
    ranks = [RankStatus(), status(1, True, heard=9), status(1, True, heard=11)]
    assert find_cut_off(ranks, now=NOW, timeout=TIMEOUT).missing == (2,)
    assert find_cut_off(ranks[:2], now=NOW, timeout=TIMEOUT) is None


# With parameter servers.


def tasks(held=(), **changed):
    """Five tasks that all reported a moment ago: the chief waits, the others serve."""
    given = {"chief": status(200, True), "worker0": status(2000, False)}
    given |= {name: status(2000, False) for name in ("worker1", "ps", "evaluator")}
    given |= changed
    if given["chief"].last:
        given["chief"].last = dataclasses.replace(given["chief"].last, held=dict(held))
    return [dataclasses.replace(task, role=name.rstrip("01")) for name, task in given.items()]


def replaceable(*held, **changed):
    return find_replaceable(tasks(*held, **changed), now=NOW, timeout=TIMEOUT)


def served(*held, **changed):
    return find_served(tasks(*held, **changed), now=NOW, timeout=TIMEOUT)


SERVING = {name: status(2000, True) for name in ("worker0", "ps")}
SLEEPS, LOST = status(2000, False), status(0, False, heard=101)
REPLACED = {
    "a silent worker and evaluator": ((), {"worker1": LOST, "evaluator": LOST}, [2, 4]),
    "a worker that idles over its work": ({"0": 106.0}, {}, [1]),
    "one that has not idled for long": ({"0": 104.0}, {}, []),
    "one that computes": ({"0": 900.0}, {"worker0": status(2000, False, busy=9)}, []),
    "an evaluator that idles": ((), {"evaluator": status(106, True)}, [4]),
    "an evaluator that computes": ((), {"evaluator": status(106, True, busy=9)}, []),
    "a worker that sleeps at its start": ((), {"chief": joining(200), **SERVING}, [2]),
    "and is not seen": ((), {"chief": joining(200), "worker1": unseen(), **SERVING}, [2]),
    "and computes": (
        (),
        {"chief": joining(200), "worker1": status(2000, False, busy=9), **SERVING},
        [],
    ),
    "and nobody waits": ((), SERVING, []),
    "nobody while a server is silent": ({"0": 150.0}, {"ps": LOST}, []),
}


@pytest.mark.parametrize(("held", "changed", "which"), REPLACED.values(), ids=REPLACED)
def test_which_tasks_are_replaced(held, changed, which):
    assert list(replaceable(held, **changed)) == which


ENDED = {
    "a silent server": ({"ps": LOST, "chief": status(0, True, heard=110)}, (3,), (0,)),
    # after the workers for which it may wait
    "a silent chief": ({"chief": status(90, False, heard=116)}, (0,), ()),
    "a chief that idles": ({"chief": status(106, False)}, (0,), ()),
    "a server that sleeps at its start": (
        {"chief": joining(200), "ps": SLEEPS, "worker0": status(2000, True)},
        (3,),
        (0,),
    ),
    "a chief that sleeps at its start": ({"chief": unseen(), **SERVING}, (0,), (1, 3)),
}


@pytest.mark.parametrize(("changed", "missing", "waiting"), ENDED.values(), ids=ENDED)
def test_which_tasks_end_the_job(changed, missing, waiting):
    stall = served(**changed)
    assert (stall.missing, stall.waiting) == (missing, waiting)


@pytest.mark.parametrize(
    ("held", "chief"),
    [
        ((), status(90, False, heard=114)),
        ((), status(104, False)),
        ((), status(900, False, busy=9)),
        ({"0": 1.0}, status(900, False)),  # a worker computes
        ((), status(900, True)),
        ((), unseen(ran=9)),
    ],
)
def test_a_chief_that_waits_or_computes_is_no_stall(held, chief):
    assert served(held, chief=chief, **(SERVING if chief.last is None else {})) is None


def test_what_a_stopped_launcher_has_not_heard_is_held_against_nobody():
    silent = status(120, False, heard=120)
    silent.delay(50)
    assert replaceable(worker0=silent) == {}


def test_a_rank_tells_where_it_is_without_a_folder_for_files(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    stack, _ = progress.stacks_of_this_process(threading.get_ident())
    assert "in test_a_rank_tells_where_it_is_without_a_folder_for_files" in stack


def test_after_the_collectives_of_callbacks_a_rank_is_after_its_step(monkeypatch):
    """`dtk top` showed "after collective 98" in place of the step."""
    monkeypatch.setattr(progress, "_reporter", progress._Reporter(60.0, lambda report: None))
    places = []
    for what in ("collective", "train step", "collective"):
        with progress.inside(what):
            places.append(progress._reporter.position.what)
        places.append(progress._reporter.position.what)
    assert places == ["collective 1"] * 2 + ["train step 1"] * 2 + ["collective 2", "train step 1"]
    assert progress._reporter.position.number == 3


# With real ranks.

LOOPS = """
import sys, time
from dtk.cluster import progress
progress.start()
with progress.inside("train step"):
    pass
if sys.argv[1] == "0":
    with progress.inside("train step"):
        time.sleep(600)
while True:
    pass
"""
LOSES = """
import os, sys, time
os.environ["DTK_STALL_TIMEOUT"] = "0"  # these report once and fall silent
from dtk.cluster import report_channel
from dtk.cluster.stall import RankReport
report_channel.tell({"progress": vars(RankReport(5, inside=True, what="train step 5"))})
if sys.argv[1] == "0":
    sys.exit("UnavailableError: task 1 has stopped sending heartbeats")
time.sleep(600)
"""


NAPS = """
import sys, time
from dtk.cluster import progress
progress.start()
with progress.inside("train step"):
    time.sleep(2 if sys.argv[1] == "0" else 0)
time.sleep(2)
"""


def two_ranks(code, timeout, ends=124):
    """Run two ranks of plain Python to their end, by a stall; returns what was said."""
    processes = ranks(code, DTK_RUN="1", DTK_STALL_TIMEOUT=f"{timeout}")
    err = io.StringIO()
    with a_job(processes, stall_timeout=timeout, grace=0.5, stdout=err, stderr=err) as job:
        assert job.wait(timeout=90) == ends
    return err.getvalue()


@pytest.mark.full("half a minute of waiting; its rule is tested by its times, too")
def test_a_loop_without_an_end_is_told_and_then_ended():
    said = two_ranks(LOOPS, 2.0)
    where = "rank 1, host localhost, computed without the others for {} s, after train step 1."
    told = f"dtk run: {where.format(2)} The others wait, and the job is ended after 24 s of that"
    assert said.count(told) == 1, said
    assert where.format(24) in said.split("stopped moving, and was ended.")[1]
    assert "rank 0 waits in train step 2." in said


def test_with_a_timeout_of_0_nothing_is_a_stall():
    assert two_ranks(NAPS, 0, ends=0) == ""


@pytest.mark.full("ranks that are lost end a job as in other tests of this folder")
def test_a_rank_that_is_cut_off_is_named_and_not_the_one_that_lost_it():
    # TensorFlow noticed before the timeout; rank 0 was said to have failed first.
    last = two_ranks(LOSES, 8.0).splitlines()[-1]
    assert last == "rank 1, host localhost, reported nothing for 4 s, last in train step 5."
