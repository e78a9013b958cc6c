"""Starting a job again after it failed: what is decided, in any order, and with real processes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dtk.cluster import Host
from dtk.errors import ClusterError
from dtk.launch import Job, job_processes, plan
from dtk.launch.attempts import (
    LONGEST_WAIT,
    PATIENCE,
    Attempts,
    AwaitHosts,
    Over,
    StartJob,
    Supervisor,
)
from dtk.launch.plan import Process


class AnyHistory(RuleBasedStateMachine):
    """A job that fails, loses hosts and is stopped at any moment."""

    @initialize(
        slots=st.lists(st.integers(1, 3), max_size=4),
        most=st.integers(0, 3),
        data=st.data(),
    )
    def begin(self, slots, most, data):
        self.hosts = tuple(Host(f"node{i}", n) for i, n in enumerate(slots))
        total = sum(slots) or 3
        self.wanted = data.draw(st.integers(1, total))
        self.fewest = data.draw(st.integers(1, self.wanted)) if slots else self.wanted
        self.most = most
        self.attempts = Attempts(self.hosts, self.wanted, self.fewest, most)
        self.failures = self.runs = 0
        self.waited, self.stopped = 0.0, False
        self.take(self.attempts.begin())
        assert (self.action.workers, self.action.hosts) == (self.wanted, self.hosts)

    def take(self, action):
        self.action = action
        if isinstance(action, StartJob):
            assert action.attempt == self.runs
            self.runs += 1

    @precondition(lambda self: isinstance(self.action, StartJob))
    @rule(code=st.sampled_from([0, 1, 124, 137]), mistake=st.booleans(), stopped=st.booleans())
    def ends(self, code, mistake, stopped):
        first, self.stopped = self.runs == 1, stopped
        self.take(self.attempts.ended(code, stopped, mistake))
        self.waited = 0.0
        if code == 0 or stopped or (mistake and first) or self.failures == self.most:
            assert isinstance(self.action, Over) and self.action.code == code
        else:
            self.failures += 1
            assert isinstance(self.action, AwaitHosts)
            assert self.action.seconds == min(LONGEST_WAIT, 2 ** (self.failures - 1))

    @precondition(lambda self: isinstance(self.action, AwaitHosts))
    @rule(data=st.data())
    def looks(self, data):
        names = data.draw(st.sets(st.sampled_from([h.name for h in self.hosts] or ["none"])))
        there = [host for host in self.hosts if host.name in names]
        slots = sum(host.slots for host in there) if self.hosts else self.wanted
        self.take(self.attempts.looked(names))
        if slots >= self.fewest:
            assert self.action == StartJob(tuple(there), min(self.wanted, slots), self.runs - 1)
        elif self.waited < PATIENCE:
            assert isinstance(self.action, AwaitHosts)
            self.waited += self.action.seconds
        else:
            assert isinstance(self.action, Over) and self.action.code != 0

    @precondition(lambda self: isinstance(self.action, StartJob) and self.attempts.missing)
    @rule()
    def missing_hosts_return(self):
        before = self.attempts.restarts
        self.take(self.attempts.looked([host.name for host in self.hosts]))
        assert self.action.workers == self.wanted and self.attempts.restarts == before

    @precondition(lambda self: isinstance(self.action, Over))
    @rule()
    def nothing_follows(self):
        asked_for = self.action.code == 0 or not self.most
        assert self.action.why or asked_for or self.stopped

    @invariant()
    def bounds_hold(self):
        assert self.attempts.restarts == self.failures <= self.most
        if isinstance(self.action, StartJob):
            assert self.fewest <= self.action.workers <= self.wanted
            full = self.action.workers == self.wanted
            assert bool(self.attempts.missing) == (not full)


def test_any_history_keeps_the_bounds():
    run_state_machine_as_test(AnyHistory)


def supervised(tmp_path, code, attempts, monkeypatch, **options):
    """Run ranks of plain Python, each told the attempt; returns code, stdout and what was said."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    out, err, said = io.StringIO(), io.StringIO(), []

    def make(run):
        hosts = [host.name for host in run.hosts for _ in range(host.slots)] or ["localhost"] * 9
        env = {"ATTEMPT": str(run.attempt)}
        processes = [
            Process(f"rank {r}", "worker", r, hosts[r], (sys.executable, "-c", code), env)
            for r in range(run.workers)
        ]
        shell = str(tmp_path / "shell")
        return Job(
            processes,
            output_dir=tmp_path / "out",
            append=run.attempt > 0,
            remote_shell=shell,
            grace=1.0,
            stdout=out,
            stderr=err,
        )

    (tmp_path / "shell").write_text('#!/bin/sh\nshift; exec sh -c "$*"\n')
    (tmp_path / "shell").chmod(0o755)
    answers = options.pop("answers", lambda host: True)
    supervisor = Supervisor(attempts, make, answers, said.append, **options)
    given = supervisor.run(options.pop("hosts", [host.name for host in attempts._hosts]))
    assert all(job_processes.members(job.job_id) == [] for job in supervisor.jobs)
    return given, out.getvalue(), said


FAILS = (
    "import os; a = int(os.environ['ATTEMPT']); print('attempt', a); os._exit(0 if a > {} else 3)"
)


def test_a_job_that_fails_is_started_again(tmp_path, monkeypatch):
    attempts = Attempts((), 1, None, 3)
    code, out, said = supervised(tmp_path, FAILS.format(1), attempts, monkeypatch)
    assert (code, out) == (0, "[0] attempt 0\n[0] attempt 1\n[0] attempt 2\n")
    assert said == [
        "starting the job again in 1 s (restart 1 of 3)",
        "starting the job again in 2 s (restart 2 of 3)",
    ]
    # what an earlier attempt wrote is kept
    assert (tmp_path / "out" / "rank-0.log").read_text().count("attempt") == 3


def test_restarts_end_with_the_code_of_the_last_failure(tmp_path, monkeypatch):
    attempts = Attempts((), 1, None, 1)
    code, out, said = supervised(tmp_path, FAILS.format(5), attempts, monkeypatch)
    assert (code, out.count("attempt")) == (3, 2)
    assert said[-1] == "no restart is left of 1"


HOSTS = (Host("node1.invalid", 1), Host("node2.invalid", 1))


def test_a_job_goes_on_without_a_lost_host(tmp_path, monkeypatch):
    attempts = Attempts(HOSTS, 2, 1, 2)
    code, out, said = supervised(
        tmp_path,
        FAILS.format(0),
        attempts,
        monkeypatch,
        answers=lambda host: host != "node1.invalid",
    )
    assert (code, out.count("attempt 1")) == (0, 1)
    assert said[-1] == "going on with 1 workers, without node1.invalid, until it answers again"


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
    code, out, said = supervised(
        tmp_path,
        serves,
        Attempts(HOSTS, 2, 1, 1),
        monkeypatch,
        answers=answers,
        probe_every=0.5,
    )
    assert code == 0
    assert [out.count(f"attempt {a}") for a in range(3)][1:] == [1, 2] and "saved" in out
    assert said[-1] == "node1.invalid answers again: the job is ended, to go on with it"


def test_too_few_hosts_are_waited_for_and_then_named(tmp_path, monkeypatch):
    code, _, said = supervised(
        tmp_path, FAILS.format(0), Attempts(HOSTS, 2, 2, 1), monkeypatch, answers=lambda host: False
    )
    assert code == 3
    assert said[1] == "waiting until node1.invalid, node2.invalid can be reached"
    assert "no answer from node1.invalid, node2.invalid for 10 minutes" in said[-1]
    assert len(said) == 3


def test_a_first_attempt_that_cannot_start_is_an_error(tmp_path, monkeypatch):
    def make(run):
        return Job([Process("rank 0", "worker", 0, "localhost", ("/no/such",), {})])

    supervisor = Supervisor(Attempts((), 1, None, 3), make, lambda host: True, print)
    with pytest.raises(ClusterError, match="cannot start /no/such"):
        supervisor.run()
    assert len(supervisor.jobs) == 1


def test_a_mistake_before_the_first_step_is_not_made_again():
    """Without reports of ranks it cannot be told, and the job is started again."""
    for timeout, wanted in ((5.0, True), (0.0, False)):
        job = Job(
            plan([sys.executable, "-c", "import no_such_module"], workers=1),
            stall_timeout=timeout,
            stdout=io.StringIO(),
            stderr=io.StringIO(),
        )
        with job:
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
    print("weights", [float(w).hex() for w in model.get_weights()[0].ravel()])
"""


@pytest.mark.full
def test_training_that_was_killed_twice_ends_with_the_same_weights(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINS)

    def train(how):
        command = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--max-restarts", "2"]
        done = subprocess.run(
            [*command, str(script), str(tmp_path / how), how],
            capture_output=True,
            text=True,
            timeout=180,
            env=dict(os.environ),
        )
        assert done.returncode == 0, done.stderr
        return next(line for line in done.stdout.splitlines() if "weights" in line), done.stderr

    killed, said = train("die")
    assert "rank 1, host localhost failed first, by SIGKILL" in said
    assert "rank 0, host localhost failed first, by SIGKILL" in said
    assert killed == train("whole")[0]
