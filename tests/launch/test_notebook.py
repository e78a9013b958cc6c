"""`dtk.notebook_launcher`: what comes back, what fails, and that nothing is left running."""

import functools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

import dtk

pytestmark = pytest.mark.command

ROOT = Path(__file__).resolve().parents[2]
TRAINS = """
import os, signal, time
import dtk

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's `&` has taken away

def train():
    print(os.getpid(), os.environ["DTK_JOB"], flush=True)
    time.sleep(600)

dtk.notebook_launcher(train)
"""


def test_every_rank_runs_the_function_and_rank_0_gives_the_result(capfd):
    factor = 21

    def train(more):
        here = dtk.cluster.detect()
        print("on", here.rank)
        return {"rank": here.rank, "product": factor * here.size + more}

    result = dtk.notebook_launcher(functools.partial(train, 0.5), 2, "collective")
    assert result == {"rank": 0, "product": 42.5}
    captured = capfd.readouterr()
    assert sorted(captured.out.splitlines()) == ["[0] on 0", "[1] on 1"]
    assert captured.err == ""


def test_a_rank_that_fails_is_named_and_its_traceback_is_shown(capfd):
    def train():
        if dtk.cluster.detect().rank == 1:
            raise ValueError("boom")
        threading.Event().wait(600)

    with pytest.raises(dtk.errors.RankError, match="^rank 1 failed with .* 1: ValueError: boom"):
        dtk.notebook_launcher(train, n=2, communicator="collective")
    assert ", in train\nValueError: boom\n" in capfd.readouterr().err


def test_a_function_that_exits_returns_nothing():
    """A FileNotFoundError named a file of dtk's."""
    with pytest.raises(dtk.errors.RankError, match="^rank 0 ended .* before the function returned"):
        dtk.notebook_launcher(lambda: sys.exit(0), n=2, communicator="collective")


@pytest.mark.parametrize("copies", [True, False])
def test_an_exception_of_a_rank_is_the_cause_where_it_can_be_copied(copies):
    class Lost(LookupError):  # of the notebook
        def __init__(self, key):
            super().__init__(f"no {key}")
            self.key = key
            self.lock = None if copies else threading.Lock()

        def __reduce__(self):
            return Lost, (self.key,), {"lock": self.lock}

    def find():
        if dtk.cluster.detect().rank == 1:
            raise Lost("x")

    with pytest.raises(dtk.errors.RankError, match="^rank 1 failed .*Lost: no x") as found:
        dtk.notebook_launcher(find, 2, "collective")
    cause = found.value.__cause__
    if copies:
        assert isinstance(cause, Lost) and (cause.key, str(cause)) == ("x", "no x")
    else:
        assert cause is None


def test_what_cannot_be_started_is_refused(monkeypatch):
    lock = threading.Lock()
    with pytest.raises(dtk.errors.ClusterError, match="cannot be copied .*make models, datasets"):
        dtk.notebook_launcher(lambda: lock)
    with pytest.raises(dtk.errors.ClusterError, match="-n 0: expected 1 or more"):
        dtk.notebook_launcher(int, n=0)
    with pytest.raises(dtk.errors.ClusterError, match="-n '2': expected 1 or more"):
        dtk.notebook_launcher(int, n="2")
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs cloudpickle: pip install .*\[notebook\]"):
        dtk.notebook_launcher(int)
    cluster = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    monkeypatch.setenv("TF_CONFIG", cluster)
    with pytest.raises(dtk.errors.ClusterError, match="^rank 1: notebook_launcher was called on a"):
        dtk.notebook_launcher(int)


def test_an_interrupted_cell_leaves_nothing_running():
    env = {**os.environ, "DTK_COMMUNICATOR": "collective"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", TRAINS], env=env, **pipes) as cell:
        ranks = [cell.stdout.readline().split()[1:] for _ in range(2)]
        cell.send_signal(signal.SIGINT)
        try:
            _, errors = cell.communicate(timeout=60)
        finally:
            cell.kill()
    assert errors.endswith("KeyboardInterrupt\n") and len(ranks) == 2
    assert not any(psutil.pid_exists(int(pid)) for pid, _ in ranks)
    (job,) = {job.partition("/")[0] for _, job in ranks}
    assert dtk.launch.job_processes.members(job) == []


@pytest.mark.full("half a minute")
def test_the_example_trains_in_its_cells():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    book = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(book, timeout=170, kernel_name="python3").execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    shown = "".join(output.get("text", "") for output in outputs)
    assert "[0] epoch 3/3" in shown.lower() and "test accuracy on 2 workers: 0." in shown
