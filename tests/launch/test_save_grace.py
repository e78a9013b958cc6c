"""A job that is ended waits for ranks that would save a checkpoint, and for no others."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from dtk.cluster import progress
from dtk.cluster.variables import SAVE_GRACE
from dtk.errors import ClusterError
from dtk.launch import agent, assign, job_processes
from dtk.launch.output import JobOutput
from dtk.launch.plan import Process

from support.launched import a_job

pytestmark = pytest.mark.command

ROOT = pathlib.Path(__file__).resolve().parents[2]

SAVES = """
import os, signal, sys, time
from dtk.cluster import progress
rank = int(os.environ["DTK_RANK"])
def end(*_):
    if {steps} < 600:
        time.sleep({steps})
        progress.tell_saving("begun")
        time.sleep({writes})
        open(sys.argv[1] + str(rank), "w").write("saved")
        sys.exit(143)
    time.sleep(600)
signal.signal(signal.SIGTERM, end)
if ({ready})(rank):
    progress.tell_saving("ready")
print("up", flush=True)
time.sleep(600)
"""


IN_A_THREAD = """
import os, sys, threading, time
from dtk.callbacks.checkpointing.termination import Termination
import types
def fit():
    alone = types.SimpleNamespace(size=1, rank=0, allgather_object=lambda value: [value])
    asked = Termination(alone)
    assert asked.install()
    print("up", flush=True)
    while not asked.wanted_after_step():
        time.sleep(0.1)
    time.sleep({writes})
    open(sys.argv[1] + os.environ["DTK_RANK"], "w").write("saved")
    asked.remove()
    raise SystemExit(143)
thread = threading.Thread(target=fit)
thread.start()
thread.join()
time.sleep({after})
"""


class Lines(io.StringIO):
    """Output that tells when so many lines have come."""

    def __init__(self, wanted):
        super().__init__()
        self.come, self._wanted = threading.Event(), wanted

    def write(self, text):
        super().write(text)
        if self.getvalue().count("\n") >= self._wanted:
            self.come.set()
        return len(text)


def hear_all(job):
    """Wait until the launcher has heard what ranks say by their other channel."""
    time.sleep(0.3)
    assert all(rank.code is None for rank in job._state.tasks)


def stopped(
    place, steps=0.0, writes=0.0, ready="lambda rank: True", grace=1.0, save_grace=20.0, **also
):
    """Stop a job of two ranks; returns what is saved, what was said, and the seconds it took."""
    code = SAVES.format(steps=steps, writes=writes, ready=ready)
    processes = assign([sys.executable, "-c", code, f"{place}/"], 2)
    for process in processes:
        process.env.update({SAVE_GRACE: f"{save_grace}", "DTK_RANK": str(process.rank)})
        process.env.update(PYTHONPATH=str(ROOT))
    out, said = Lines(2), io.StringIO()
    with a_job(processes, grace=grace, save_grace=save_grace, stdout=out, stderr=said) as job:
        assert out.come.wait(60), said.getvalue()
        hear_all(job)
        began = time.monotonic()
        job.stop()
        seconds = time.monotonic() - began
    assert job_processes.members(job.job_id) == []
    assert job.wait() == 143
    return sorted(path.name for path in place.iterdir()), said.getvalue(), seconds


def test_it_waits_longer_than_the_grace_for_a_rank_that_saves(tmp_path):
    saved, said, _ = stopped(tmp_path, steps=1.5, writes=1.5, save_grace=2.5)
    assert saved == ["0", "1"]
    assert said == (
        "dtk run: waiting up to 2.5 s for a checkpoint of rank 0, rank 1; once more ends them now\n"
    )


@pytest.mark.full_but("step")
@pytest.mark.parametrize("steps, writes", [(600, 0), (0, 600)], ids=["step", "write"])
def test_it_says_that_nothing_was_saved(tmp_path, steps, writes):
    saved, said, seconds = stopped(tmp_path, steps, writes, save_grace=1.0)
    assert saved == []
    what = "no step ended within 1 s, so nothing was" if steps else "the checkpoint was not written"
    assert what in said and "give --save-grace more seconds" in said
    assert seconds >= 1.0


def test_nothing_is_said_under_the_lock_that_other_threads_need(tmp_path, monkeypatch):
    """Breaks as a launcher that hangs, where the reader of its output goes at this moment."""
    say, was_free = JobOutput.say, []

    def try_lock(lock):
        was_free.append(lock.acquire(timeout=2))
        if was_free[-1]:
            lock.release()

    def checked(output, text):
        thread = threading.Thread(target=try_lock, args=(output._state.changed,))
        thread.start()
        thread.join()
        say(output, text)

    monkeypatch.setattr(JobOutput, "say", checked)
    stopped(tmp_path, 600, save_grace=1.0)
    assert was_free == [True, True]


def test_who_would_save_nothing_is_not_waited_for(tmp_path):
    saved, said, seconds = stopped(tmp_path, 600, ready="lambda rank: False", save_grace=100.0)
    assert (saved, said) == ([], "") and seconds < 50


def test_ranks_that_serve_end_after_the_one_that_saves(tmp_path):
    saved, said, _ = stopped(tmp_path, 1.0, ready="lambda rank: rank == 0", grace=0.2)
    assert saved == ["0"] and "a checkpoint of rank 0;" in said


def test_a_rank_on_another_host_is_asked_through_its_agent(tmp_path, shell):
    place = tmp_path / "saved"
    place.mkdir()
    code = SAVES.format(steps=1.0, writes=0.0, ready="lambda rank: True")
    env = {SAVE_GRACE: "20", "DTK_RUN": "1", "DTK_RANK": "0", "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-c", code, f"{place}/")
    process = Process("rank 0", "worker", 0, "node0.invalid", command, env)
    out, said = Lines(1), io.StringIO()
    with a_job(
        [process], stdout=out, stderr=said, grace=0.2, save_grace=20.0, remote_shell=shell
    ) as job:
        assert out.come.wait(60), said.getvalue()
        hear_all(job)
        job.stop()
    assert [path.name for path in place.iterdir()] == ["0"], said.getvalue()


@pytest.mark.parametrize("host", ["localhost", "node0.invalid"])
@pytest.mark.parametrize("after", [0, 600])
def test_a_fit_in_a_thread_saves_when_the_launcher_asks(tmp_path, shell, host, after):
    """Python catches no SIGTERM there: it ended the rank, and nothing was saved."""
    place = tmp_path / "saved"
    place.mkdir()
    code = IN_A_THREAD.format(writes=2.0, after=after)
    env = {SAVE_GRACE: "20", "DTK_RUN": "1", "DTK_RANK": "0", "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-c", code, f"{place}/")
    process = Process("rank 0", "worker", 0, host, command, env)
    out, said = Lines(1), io.StringIO()
    options = {"grace": 0.5, "save_grace": 20.0, "remote_shell": shell}
    with a_job([process], stdout=out, stderr=said, **options) as job:
        assert out.come.wait(60), said.getvalue()
        hear_all(job)
        began = time.monotonic()
        job.stop()
        assert time.monotonic() - began < 15, "it waits for no more than the checkpoint"
    assert [path.name for path in place.iterdir()] == ["0"], said.getvalue()
    assert job.wait() == 143


def test_an_interrupt_meanwhile_ends_at_once(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SAVES.format(steps=500, writes=0, ready="lambda rank: True"))
    launcher = subprocess.Popen(
        [sys.executable, "-m", "dtk.cli.main", "run", "-n", "1", str(path), f"{tmp_path}/saved"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DTK_RANK": "0"},
    )
    try:
        assert launcher.stdout is not None and launcher.stderr is not None
        assert "up" in launcher.stdout.readline()
        time.sleep(0.5)  # what it said on standard error may be read later
        launcher.send_signal(signal.SIGTERM)
        assert "waiting up to 60 s" in launcher.stderr.readline()
        began = time.monotonic()
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=60)
        assert time.monotonic() - began < 30
        assert launcher.returncode == 143 and "SIGTERM: every process was ended" in said
    finally:
        with contextlib.suppress(ProcessLookupError):
            launcher.kill()
        launcher.wait()


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan", "inf"])
def test_a_grace_that_is_none(given):
    with pytest.raises(ClusterError, match=f"{SAVE_GRACE}='{given}'"):
        progress.save_grace({SAVE_GRACE: given})


TRAINS = """
import sys, time
import dtk, keras, numpy as np
strategy = dtk.auto_strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch:
            print("step", flush=True)
            time.sleep(float(sys.argv[2]))
x = np.ones((64, 4), "float32")
model.fit(x, x[:, :1], epochs=4, batch_size=16, verbose=0,
          callbacks=[dtk.callbacks.Checkpoint(sys.argv[1], save_freq=1000), Slow()])
"""


@pytest.mark.full
@pytest.mark.parametrize("servers", [[], ["--ps", "1"]], ids=["ranks", "servers"])
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_training_of_slow_steps_is_saved(tmp_path, servers, ending):
    """Also where the launcher is killed: what ranks print has no reader any more."""
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    command = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", *servers]
    launcher = subprocess.Popen(
        [*command, "--timeout-grace", "1", str(script), str(tmp_path / "saved"), "6"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert "step" in launcher.stdout.readline()
        time.sleep(0.5)  # what ranks say by another channel may be read later
        children = psutil.Process(launcher.pid).children()
        ranks = [child for child in children if str(script) in child.cmdline()]
        launcher.send_signal(ending)
        out, said = launcher.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            launcher.kill()
        launcher.wait()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert gone and not alive
    assert [path.name for path in (tmp_path / "saved").glob("checkpoint-*")], out + said
    if ending == signal.SIGTERM:
        assert launcher.returncode == 143, said
        assert "SIGTERM: saved" in out and "waiting up to 60 s for a checkpoint of rank 0" in said


def test_the_pipes_of_a_rank_are_kept_open_once():
    """Each word of the rank's opened them again."""
    count = len(os.listdir("/proc/self/fd"))
    saver = agent.Saver("no-job", 1.0)
    with subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        kept = []
        for word in ("ready", "begun", "ready", "over"):
            saver.note(word, rank.pid)
            kept.append(len(os.listdir("/proc/self/fd")) - count - 2)
        rank.kill()
    assert kept == [2, 2, 2, 0]


def test_the_guard_ends_a_rank_that_does_not_save(tmp_path):
    code = SAVES.format(steps=600, writes=0, ready="lambda rank: rank == 0")
    launcher = (
        "import sys, time\nfrom dtk.launch import Job, JobSpec, assign\n"
        f"processes = assign([sys.executable, '-c', {code!r}, {str(tmp_path)!r}], 2)\n"
        "for one in processes:\n"
        f"    one.env.update(DTK_RANK=str(one.rank), PYTHONPATH={str(ROOT)!r}, {SAVE_GRACE}='1')\n"
        "spec = JobSpec(processes=tuple(processes), grace=0.5, save_grace=1.0)\n"
        "job = Job(spec).start()\n"
        "print('job', job.job_id, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True
    ) as started:
        lines = sorted(started.stdout.readline().split() for _ in range(3))
        time.sleep(0.5)  # what it said on standard error may be read later
        started.kill()
        ((*_, first), (*_, second), (_, job)) = lines
        assert (first, second) == ("up", "up")
        began = time.monotonic()
    while (left := job_processes.members(job)) and time.monotonic() < began + 30:
        time.sleep(0.1)
    assert left == []
    assert time.monotonic() - began >= 2.0, "rank 0 had the time to save"
