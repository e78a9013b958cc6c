"""Telling a job that is stuck from one that is slow: by what is known, and with real ranks."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.cluster.rank_status import RankStatus
from dtk.cluster.stall import (
    ALONE,
    describe,
    find,
    find_cut_off,
    find_replaceable,
    find_served,
    find_short,
)
from dtk.cluster.usage import Usage
from dtk.launch import Job
from dtk.launch.plan import Process

TIMEOUT = 100.0


def status(still, inside, count=5, what="train step 5", heard=0.0, busy=1000.0, **more):
    """A rank of which all times are seconds ago."""
    report = {"count": count, "inside": inside, "what": what, "still": still, "alone": False}
    report |= {"joining": False, "loops": 0, "feeds": False, "refused": False}
    report |= {"cpu": 0.0, "io": 0, "stack": "", "held": {}, **more}
    times = {"heard": 1e4 - heard, "moved": 1e4 - still, "busy": 1e4 - busy}
    return RankStatus(**times, last=report)


def found(*statuses):
    return find(statuses, now=1e4, timeout=TIMEOUT)


def described(stall, *ranks):
    for index, rank in enumerate(ranks):
        rank.name, rank.host = f"rank {index}", "ab"[index]
    return describe(stall, ranks)


def test_a_rank_outside_that_does_nothing_is_missing():
    stall = found(status(150, inside=True), status(151, inside=False))
    assert (stall.missing, stall.waiting) == ((1,), (0,))
    assert stall.why == "did nothing for 100 s"


@pytest.mark.parametrize(
    ("statuses", "why"),
    [
        ((status(90, True), status(91, False)), "not for long enough"),
        ((status(150, True), status(151, False, busy=20)), "computing, or reading and writing"),
        ((status(150, True), status(150, True, busy=20)), "a slow step"),
        ((status(150, False), status(150, False)), "nobody waits for anybody"),
        ((status(150, True), RankStatus()), "not all have begun"),
        ((status(150, True), status(20, False)), "one moves"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_stall(statuses, why):
    assert found(*statuses) is None, why


def test_a_rank_that_loops_for_ever_is_named_in_the_end():
    """It had been waited for as long as it used its processor."""
    bound = ALONE * TIMEOUT
    assert found(status(bound - 1, True), status(bound + 9, False, busy=1)) is None
    assert found(status(bound + 1, True), status(20, False, busy=1)) is None
    stall = found(status(bound + 1, True), status(bound + 9, False, busy=1))
    assert (stall.missing, stall.waiting) == ((1,), (0,))
    assert stall.why == "computed without the others for 1200 s,"
    # All inside, such as in a step that is one epoch long: nobody waits for a rank outside.
    assert found(*[status(bound + 1, True, busy=1)] * 2) is None


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


def test_a_loop_without_an_end_is_told_and_then_ended():
    err = io.StringIO()
    env = {"DTK_RUN": "1", "DTK_STALL_TIMEOUT": "2"}
    processes = [
        Process(f"rank {r}", "worker", r, "localhost", (sys.executable, "-c", LOOPS, str(r)), env)
        for r in range(2)
    ]
    with Job(processes, stall_timeout=2.0, grace=0.5, stdout=io.StringIO(), stderr=err) as job:
        assert job.wait(timeout=90) == 124
    said = err.getvalue()
    where = "rank 1, host localhost, computed without the others for {} s, after train step 1."
    told = f"dtk run: {where.format(2)} The others wait, and the job is ended after 24 s of that"
    assert said.count(told) == 1, said
    assert where.format(24) in said.split("stopped moving, and was ended.")[1]
    assert "rank 0 waits in train step 2." in said


def unseen(since=500, ran=500):
    """A rank that was started, and has reported nothing yet."""
    return RankStatus(started=True, moved=1e4 - since, ran=None if ran is None else 1e4 - ran)


def joining(still, **more):
    return status(still, inside=False, what="the start of mpi", joining=True, **more)


@pytest.mark.parametrize(
    ("statuses", "missing"),
    [
        ((joining(150), unseen()), (1,)),
        ((joining(150), unseen(ran=None)), (1,)),
        ((joining(150), unseen(ran=20)), None),
        ((joining(150), unseen(since=20)), None),
        ((unseen(), unseen()), None),
        ((joining(150), status(151, inside=False, what="the start")), (1,)),
        # TensorFlow and MPI keep Python's lock while they wait.
        ((joining(150, heard=150), unseen()), (1,)),
        ((joining(150, heard=150), joining(20)), None),
    ],
)
def test_a_rank_that_does_nothing_at_its_start(statuses, missing):
    stall = found(*statuses)
    assert (None if stall is None else stall.missing) == missing


def test_a_rank_that_is_stopped_while_it_may_be_silent():
    stopped = joining(150, heard=150)
    stopped.seen, stopped.ran = (Usage("T", 1.0, 0), 1e4), 1e4 - 150
    stall = found(joining(150, heard=150), stopped)
    assert stall.missing == (1,)
    assert (
        "rank 1, host b, reported nothing for 100 s, last in the start of mpi. It is stopped"
        in described(stall, stopped, stopped)
    )


def test_a_rank_that_is_stopped_is_silent_before_it_is_idle():
    stopped = status(150, False, heard=99)
    stopped.seen, stopped.ran = (Usage("T", 1.0, 0), 1e4), 1e4 - 99
    assert found(status(150, True), stopped) is None
    stopped.delay(-2)
    assert found(status(150, True), stopped).why == "reported nothing for 100 s, last"


def test_a_rank_that_computes_and_cannot_say_so_is_not_silent():
    computing = status(1, inside=False, heard=120)
    computing.observe(Usage("R", 1.0, 0), 1e4 - 9)
    computing.observe(Usage("R", 4.0, 0), 1e4 - 5)
    assert found(status(150, inside=True), computing) is None


def test_a_rank_that_traces_is_waited_for():
    tracing = status(150, inside=False, what="the Python of train step 1", alone=True)
    stall = found(status(150, inside=True), tracing)
    assert stall.missing == (1,)
    told = described(stall, tracing, tracing)
    assert "did nothing for 100 s in the Python of train step 1." in told


def test_a_rank_whose_script_is_over():
    left = status(900, inside=False)
    left.left = True
    stall = found(status(150, inside=True), left)
    assert (stall.missing, stall.why) == ((1,), "has left its script")
    assert found(status(150, inside=False), left) is None


def test_nobody_waits_five_minutes_for_a_rank_whose_script_is_over():
    left = status(900, inside=False)
    left.left = True
    waits, computes = status(61, inside=True), status(61, inside=True, busy=50)
    stall = find([waits, left], now=1e4, timeout=300.0)
    assert stall.missing == (1,)
    told = described(stall, waits, left)
    assert "rank 1, host b, has left its script after train step 5, and every rank must run" in told
    assert find([computes, left], now=1e4, timeout=300.0) is None
    assert find([waits, status(61, inside=False), left], now=1e4, timeout=300.0) is None


def test_a_rank_whose_data_ended_before():
    stall = found(
        status(150, True, count=8, what="train step 8"),
        status(150, True, count=9, what="collective 1", loops=1),
    )
    assert (stall.missing, stall.waiting) == ((1,), (0,))
    assert stall.why.startswith("has come to the end of its data before the others")


def test_a_rank_that_has_failed_of_shorter_data_of_another():
    """MPI notices at once that ranks are in different collectives, and not which is wrong."""
    ranks = [status(1, True, refused=True), status(1, True, loops=1)]
    assert find_short(ranks).missing == (1,)
    assert find_short([status(1, True), status(1, True, loops=1)]) is None
    assert find_short([status(1, True, refused=True), status(1, True)]) is None


def test_a_rank_whose_generator_is_waited_for():
    stall = found(status(150, True), status(150, True, feeds=True))
    assert (stall.missing, stall.why) == ((1,), "got no data for 100 s from Python")
    assert found(status(150, True), status(150, True, feeds=True, busy=20)) is None


def test_a_rank_that_reports_nothing_is_missing_whatever_it_did():
    stall = found(status(150, True), status(150, True, heard=120, busy=110), status(1, False))
    assert (stall.missing, stall.waiting) == ((1,), (0, 2))


def test_ranks_that_wait_in_different_places():
    stall = found(
        status(150, True, count=8, what="train step 8"),
        status(150, True, count=9, what="collective 1"),
    )
    assert stall.missing == () and stall.waiting == (0, 1)
    assert "the data of one ends earlier" in stall.why


def test_nobody_does_anything():
    stall = found(status(150, True), status(150, True))
    assert stall.missing == () and stall.why == "No rank did anything for 100 s"


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
    moved = any(1e4 - rank.moved < TIMEOUT for rank in ranks)
    waited_for = [rank for rank in ranks if not rank.last["inside"]] or ranks
    working = all(1e4 - rank.busy < TIMEOUT for rank in waited_for)
    if moved or working:
        assert stall is None
    if stall is not None:
        assert stall.missing or stall.waiting
        assert all(1e4 - ranks[i].busy >= TIMEOUT for i in stall.missing)
        assert not any(ranks[i].last["inside"] for i in stall.missing)


def test_reports_tell_work_from_waiting():
    report = dict(status(0, False).last)
    rank = RankStatus()
    rank.take({**report, "cpu": 1.0}, now=10.0)
    rank.take({**report, "cpu": 1.01, "still": 1.0}, now=11.0)
    assert rank.busy == 0.0 and rank.moved == 10.0
    rank.take({**report, "cpu": 1.2, "still": 2.0}, now=12.0)
    assert rank.busy == 12.0
    rank.take({**report, "cpu": 1.2, "io": 1_000_000, "still": 3.0}, now=13.0)
    assert rank.busy == 13.0


def test_a_silent_rank_is_what_others_have_lost():
    ranks = [RankStatus(), status(1, True, heard=9), status(1, True, heard=11)]
    assert find_cut_off(ranks, now=1e4, timeout=TIMEOUT).missing == (2,)
    assert find_cut_off(ranks[:2], now=1e4, timeout=TIMEOUT) is None


LOSES = """
import sys, time
from dtk.cluster import report_channel
report = {"count": 5, "inside": True, "what": "train step 5", "still": 0.0}
report |= {"cpu": 0.0, "io": 0, "stack": "", "held": {}, "alone": False, "joining": False}
report |= {"loops": 0, "refused": False, "feeds": False}
report_channel.tell({"progress": report})
if sys.argv[1] == "0":
    sys.exit("UnavailableError: task 1 has stopped sending heartbeats")
time.sleep(600)
"""


def test_a_rank_that_is_cut_off_is_named_and_not_the_one_that_lost_it():
    # TensorFlow noticed before the timeout; rank 0 was said to have failed first.
    err = io.StringIO()
    processes = [
        Process(f"rank {r}", "worker", r, "localhost", (sys.executable, "-c", LOSES, str(r)), {})
        for r in range(2)
    ]
    with Job(processes, stall_timeout=8.0, grace=1.0, stdout=io.StringIO(), stderr=err) as job:
        assert job.wait(timeout=60) == 124
    last = err.getvalue().splitlines()[-1]
    assert last == "rank 1, host localhost, reported nothing for 4 s, last in train step 5."


SCRIPT = """
import os, signal, sys, time
import dtk, keras, numpy as np
strategy = dtk.auto_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="only")])
    model.compile("sgd", "mse")
class Stuck(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and strategy.rank == 1:
            {stuck}
def rows():
    for _ in range({batches}):
        yield np.ones((4, 4)), np.ones((4, 2))
model.fit(rows(), epochs=2, steps_per_epoch={steps}, verbose=0, callbacks=[Stuck()])
print("done")
"""
BUSY = "began = time.time()\n            while time.time() - began < 9: sum(range(10_000))"


def job(tmp_path, stuck="pass", batches=8, steps=4, communicator="auto", timeout="4"):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(stuck=stuck, batches=batches, steps=steps))
    command = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--stall-timeout", timeout]
    return subprocess.run(
        [*command, "--communicator", communicator, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
    )


@pytest.mark.parametrize("communicator", ["auto", "collective", "horovod"])
def test_a_rank_that_sleeps_is_named_with_its_stack(tmp_path, communicator):
    done = job(tmp_path, "time.sleep(600)", communicator=communicator)
    assert done.returncode == 124, done.stderr
    last = done.stderr[done.stderr.index("dtk: the job has stopped moving, and was ended.") :]
    assert "rank 1, host localhost, did nothing for 4 s after " in last
    assert f'File "{tmp_path}/train.py", line 11 in on_epoch_begin' in last
    assert last.rstrip().splitlines()[-1] == "rank 0 waits in train step 5."
    assert "progress" not in done.stderr


def test_a_rank_that_is_stopped_is_named(tmp_path):
    done = job(tmp_path, "os.kill(os.getpid(), signal.SIGSTOP)")
    assert done.returncode == 124, done.stderr
    assert "rank 1, host localhost, reported nothing for 4 s, last " in done.stderr
    assert done.stderr.rstrip().splitlines()[-1] == "rank 0 waits in train step 5."


def test_data_that_ends_earlier_on_one_rank_ends_the_job(tmp_path):
    fewer = "8 if strategy.rank == 0 else 7"
    done = job(tmp_path, batches=fewer, steps="None", communicator="collective")
    assert done.returncode == 124, done.stderr
    named = "rank 1, host localhost, has come to the end of its data before the others, and waits "
    assert named in done.stderr
    assert "rank 0 waits in train step 8." in done.stderr


def test_a_slow_callback_is_no_stall(tmp_path):
    done = job(tmp_path, BUSY)
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stderr
    done = job(tmp_path, "time.sleep(8)", timeout="0")
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stderr


# With parameter servers.


def tasks(held=(), **changed):
    """Five tasks that all reported a moment ago: the chief waits, the others serve."""
    given = {"chief": status(200, True), "evaluator": status(2000, False)}
    given |= {name: status(2000, False) for name in ("worker0", "worker1", "ps")}
    given |= changed
    given["chief"].last["held"] = dict(held)
    return [given[name] for name in ("chief", "worker0", "worker1", "ps", "evaluator")]


def with_roles(given):
    for role, task in zip(("chief", "worker", "worker", "ps", "evaluator"), given, strict=True):
        task.role = role
    return given


def replaceable(given):
    return find_replaceable(with_roles(given), now=1e4, timeout=TIMEOUT)


def served(given):
    return find_served(with_roles(given), now=1e4, timeout=TIMEOUT)


def test_a_silent_worker_or_evaluator_is_replaced():
    given = tasks(worker1=status(0, False, heard=101), evaluator=status(0, False, heard=101))
    why = "has reported nothing for 100 s"
    assert replaceable(given) == {2: why, 4: why}
    assert served(given) is None


def test_a_worker_that_idles_over_its_work_is_replaced():
    assert list(replaceable(tasks(held={"0": 106.0}))) == [1]
    assert replaceable(tasks(held={"0": 104.0})) == {}
    assert replaceable(tasks(held={"0": 900.0}, worker0=status(2000, False, busy=9))) == {}


def test_an_evaluator_that_idles_over_its_evaluation_is_replaced():
    assert list(replaceable(tasks(evaluator=status(106, True)))) == [4]
    assert replaceable(tasks(evaluator=status(106, True, busy=9))) == {}


def test_a_silent_server_ends_the_job_and_no_worker_is_blamed_for_it():
    given = tasks({"0": 150.0}, ps=status(0, False, heard=101), chief=status(0, 1, heard=110))
    stall = served(given)
    assert (stall.missing, stall.waiting) == ((3,), (0,))
    assert replaceable(given) == {}


def test_a_chief_is_blamed_after_the_workers_for_which_it_may_wait():
    assert served(tasks(chief=status(90, False, heard=114))) is None
    assert served(tasks(chief=status(90, False, heard=116))).missing == (0,)
    assert served(tasks(chief=status(106, False))).missing == (0,)
    assert served(tasks(chief=status(104, False))) is None
    assert served(tasks(chief=status(900, False, busy=9))) is None
    assert served(tasks({"0": 1.0}, chief=status(900, False))) is None, "a worker computes"
    assert served(tasks(chief=status(900, True))) is None


def test_a_worker_that_does_nothing_at_its_start_is_replaced():
    waits = joining(200)
    starting = status(2000, False)
    serving = {name: status(2000, True) for name in ("worker0", "ps")}
    assert list(replaceable(tasks(chief=waits, worker1=starting, **serving))) == [2]
    assert list(replaceable(tasks(chief=waits, worker1=unseen(), **serving))) == [2]
    busy = status(2000, False, busy=9)
    assert replaceable(tasks(chief=waits, worker1=busy, **serving)) == {}
    assert replaceable(tasks(chief=status(200, True), worker1=starting, **serving)) == {}


def test_a_server_or_chief_that_does_nothing_at_its_start_ends_the_job():
    serving = {name: status(2000, True) for name in ("worker0", "worker1")}
    stall = served(tasks(chief=joining(200), ps=status(2000, False), **serving))
    assert (stall.missing, stall.waiting) == ((3,), (0,))
    given = tasks(ps=status(2000, True), **serving)
    given[0] = unseen()
    assert served(given).missing == (0,)
    given[0] = unseen(ran=9)
    assert served(given) is None


def test_what_a_stopped_launcher_has_not_heard_is_held_against_nobody():
    silent = status(120, False, heard=120)
    silent.delay(50)
    assert replaceable(tasks(worker0=silent)) == {}
