"""Starting a job again after it failed: in any history, and with real processes."""

from __future__ import annotations

import contextlib
import io
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.cluster import Host
from dtk.errors import ClusterError
from dtk.launch import assign, job_processes, job_run, screen
from dtk.launch.job_run import LONGEST_WAIT, PATIENCE, Attempt, JobRun
from dtk.launch.plan import JobSpec, Process

from support.launched import a_job, dtk_run

pytestmark = pytest.mark.command


class FakeJob(contextlib.nullcontext):
    """A job that ends at once; by itself, by its user, or because of a mistake."""

    def __init__(self, code, how):
        super().__init__(self)
        self.code, self.stopped = code, how == "stopped"
        self.failed_before_working_together = how == "mistake"

    def start(self):
        return self

    def wait(self, timeout=None):
        return self.code


ENDS = st.tuples(
    st.sampled_from([0, 1, 124, 137]), st.sampled_from(["itself", "itself", "stopped", "mistake"])
)


@given(
    slots=st.lists(st.integers(1, 3), max_size=4),
    most=st.integers(0, 3),
    ends=st.lists(ENDS, min_size=5, max_size=5),
    data=st.data(),
)
def test_any_history_keeps_the_bounds(slots, most, ends, data):
    hosts = tuple(Host(f"node{i}", n) for i, n in enumerate(slots))
    wanted = data.draw(st.integers(1, sum(slots) or 3))
    fewest = data.draw(st.integers(1, wanted)) if slots else wanted
    looks = data.draw(st.lists(st.sets(st.sampled_from(hosts or [None])), min_size=1, max_size=4))
    started, said, slept, looked = [], [], [], []

    def make(attempt):
        started.append(attempt)
        return FakeJob(*ends[len(started) - 1])

    spec = JobSpec(hosts=hosts, workers=wanted, min_workers=fewest, max_restarts=most)
    running = JobRun(spec)

    def answering(names):
        names = list(names)
        if not names:
            return set()
        looked.append(looks[min(len(looked), len(looks) - 1)])
        return {host.name for host in looked[-1]}

    running._made, running._answering = make, answering
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", slept.append)
        patch.setattr(screen, "say", said.append)
        code = running.wait()
    last, how = ends[len(started) - 1]
    assert started[0] == Attempt(hosts, wanted, 0)
    assert [one.number for one in started] == list(range(len(started)))
    for one in started[1:]:
        assert fewest <= one.workers <= wanted
        assert one.workers == wanted or sum(host.slots for host in one.hosts) == one.workers
        assert not hosts or set(one.hosts) in looked
    restarts = [float(line.split(" in ")[1].split()[0]) for line in said if "(restart" in line]
    assert restarts == [min(LONGEST_WAIT, 2.0**n) for n in range(len(restarts))]
    assert len(started) - 1 <= len(restarts) <= most
    gave_up = len(restarts) == len(started)  # a restart was used, and too few hosts answered
    assert code == (last or 1 if gave_up else last)
    assert not gave_up or sum(slept) - sum(restarts) >= PATIENCE
    is_mistake = how == "mistake" and len(started) == 1
    asked_for = last == 0 or how == "stopped" or is_mistake or len(restarts) == most
    assert gave_up or asked_for
    assert said or code == 0 or not most or how == "stopped"


def supervised(
    tmp_path, code, monkeypatch, hosts=(), workers=1, fewest=None, most=1, answers=lambda host: True
):
    """Run ranks of plain Python, each told the attempt; returns code, stdout and what was said."""
    out, err, said = io.StringIO(), io.StringIO(), []
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(screen, "say", said.append)

    def make(attempt):
        names = [host.name for host in attempt.hosts for _ in range(host.slots)] or ["localhost"]
        env = {"ATTEMPT": str(attempt.number)}
        return a_job(
            [
                Process(f"rank {r}", "worker", r, names[r], (sys.executable, "-c", code), env)
                for r in range(attempt.workers)
            ],
            output_dir=tmp_path / "out",
            append=attempt.number > 0,
            remote_shell=str(tmp_path / "shell"),
            grace=1.0,
            stdout=out,
            stderr=err,
        )

    (tmp_path / "shell").write_text('#!/bin/sh\nshift; exec sh -c "$*"\n')
    (tmp_path / "shell").chmod(0o755)
    spec = JobSpec(hosts=hosts, workers=workers, min_workers=fewest, max_restarts=most)
    running = JobRun(spec)
    running._made, running._answers = make, answers
    given = running.wait()
    assert all(job_processes.members(job.job_id) == [] for job in running.jobs)
    return given, out.getvalue(), said


FAILS = (
    "import os; a = int(os.environ['ATTEMPT']); print('attempt', a); os._exit(0 if a > {} else 3)"
)
HOSTS = (Host("node1.invalid", 1), Host("node2.invalid", 1))


def test_a_job_that_fails_is_started_again(tmp_path, monkeypatch):
    code, out, said = supervised(tmp_path, FAILS.format(1), monkeypatch, most=3)
    assert (code, out) == (0, "[0] attempt 0\n[0] attempt 1\n[0] attempt 2\n")
    assert said == [
        "starting the job again in 1 s (restart 1 of 3)",
        "starting the job again in 2 s (restart 2 of 3)",
    ]
    # what an earlier attempt wrote is kept
    assert (tmp_path / "out" / "rank-0.log").read_text().count("attempt") == 3


def test_a_job_is_whole_again_when_its_host_answers(tmp_path, monkeypatch):
    """The short attempt would run for ever; it is ended as a scheduler would, and may save."""
    asked = []

    def answers(host):
        asked.append(host)
        return host != "node1.invalid" or asked.count(host) > 2

    serves = (
        "import os, signal, sys, threading\na = int(os.environ['ATTEMPT'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('saved'), sys.exit(143)))\n"
        "print('attempt', a, flush=True)\n"
        "if a == 1: threading.Event().wait()\n"
        "os._exit(3 if a == 0 else 0)"
    )
    monkeypatch.setattr(job_run, "_PROBE_EVERY", 0.5)
    code, out, said = supervised(tmp_path, serves, monkeypatch, HOSTS, 2, 1, 1, answers=answers)
    assert code == 0
    assert [out.count(f"attempt {a}") for a in range(3)][1:] == [1, 2] and "saved" in out
    assert said[1] == "going on with 1 workers, without node1.invalid, until it answers again"
    assert said[-1] == "node1.invalid answers again: the job is ended, to go on with it"


def test_too_few_hosts_are_waited_for_and_then_named(tmp_path, monkeypatch):
    code, _, said = supervised(
        tmp_path, FAILS.format(0), monkeypatch, HOSTS, 2, 2, 1, answers=lambda host: False
    )
    assert code == 3
    assert said[1] == "waiting until node1.invalid, node2.invalid can be reached"
    assert "no answer from node1.invalid, node2.invalid for 10 minutes" in said[-1]
    assert len(said) == 3


def test_a_first_attempt_that_cannot_start_is_an_error():
    def make(attempt):
        return a_job([Process("rank 0", "worker", 0, "localhost", ("/no/such",), {})])

    running = JobRun(JobSpec(workers=1, max_restarts=3))
    running._made = make
    with pytest.raises(ClusterError, match="cannot start /no/such"):
        running.wait()
    assert len(running.jobs) == 1


@pytest.mark.parametrize(("timeout", "wanted"), [(5.0, True), (0.0, False)])
def test_a_mistake_before_the_first_step_is_not_made_again(timeout, wanted):
    """Without reports of ranks it cannot be told, and the job is started again."""
    processes = assign([sys.executable, "-c", "import no_such_module"], workers=1)
    out = io.StringIO()
    with a_job(processes, stall_timeout=timeout, stdout=out, stderr=out) as job:
        assert job.wait(60) == 1 and not job.stopped
    assert job.failed_before_working_together is wanted


TRAINS = """
import os, signal, sys
import dtk, keras, numpy as np
strategy = dtk.auto_strategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="only")])
    model.compile("adam", "mse")
restarts = int(os.environ["DTK_RESTARTS"])
class Die(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        last = int(model.optimizer.iterations) == 6 + 5 * restarts and strategy.rank == 1 - restarts
        if sys.argv[2] == "die" and restarts < 2 and last:
            os.kill(os.getpid(), signal.SIGKILL)
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
model.fit(x, x[:, :1], epochs=4, batch_size=16, verbose=0,
          callbacks=[dtk.callbacks.Checkpoint(sys.argv[1], save_freq=2), Die()])
if strategy.rank == 0:
    from tensorflow.python.eager import context
    print("weights", [float(w).hex() for w in model.get_weights()[0].ravel()],
          "outages of", context.context().coordination_service.heartbeat_timeout_in_ms)
"""


@pytest.mark.full
def test_training_that_was_killed_twice_ends_with_the_same_weights(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINS)

    def train(how):
        how_often = ("-n", "2", "--communicator", "collective", "--max-restarts", "2")
        done = dtk_run(*how_often, script, tmp_path / how, how, timeout=180)
        assert done.returncode == 0, done.stderr
        # TensorFlow's own limit: shorter outages are survived, see `tools/link_faults.py`.
        assert "outages of 40000\n" in done.stdout
        return next(line for line in done.stdout.splitlines() if "weights" in line), done.stderr

    killed, said = train("die")
    assert "rank 1, host localhost, failed first, by SIGKILL" in said
    assert "rank 0, host localhost, failed first, by SIGKILL" in said
    assert killed == train("whole")[0]
