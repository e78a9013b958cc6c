"""Ranks of real jobs that stop, sleep or lack data in some phase: the right one is named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from dtk.cluster import mpi_installs

SCRIPT = """
import json, os, pathlib, signal, sys, threading, time, traceback
place, how = sys.argv[1:]
known = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "HOROVOD_RANK")
me = next((os.environ[one] for one in known if one in os.environ), None)
if me is None:
    me = str(json.loads(os.environ["TF_CONFIG"])["task"]["index"])

def strike(here, victim="1"):
    if here != place or me != victim:
        return
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "busy":
        began = time.time()
        while time.time() - began < 9:
            sum(range(10_000))
    else:
        time.sleep(600)

strike("import")
import dtk
strike("imported")
import keras, numpy as np
detect = dtk.cluster.detect
def detected(*given):
    strike("constructor")
    return detect(*given)
dtk.cluster.detect = detected
strategy = dtk.strategies.AllReduceStrategy(stall_timeout=4)

class Struck(keras.layers.Layer):
    def call(self, x):
        strike("build")
        if any(frame.name == "run_step" for frame in traceback.extract_stack()):
            strike("trace")
        return x

class Strike(keras.callbacks.Callback):
    def on_test_batch_end(self, batch, logs=None):
        strike("evaluate")
    def on_predict_batch_end(self, batch, logs=None):
        strike("predict")
    def get_state(self):
        strike("save", "0")
        return {}
    def set_state(self, state):
        pass

def rows(which):
    for index in range(6 if me == "1" and place == "short " + which else 8):
        if index == 4:
            strike("data")
        yield np.ones((4, 4)), np.ones((4, 2))

rename = os.rename
def renamed(*given, **more):
    if threading.current_thread().name == "dtk-checkpoint":
        strike("thread", "0")
    return rename(*given, **more)
os.rename = renamed
with strategy.scope():
    layers = [Struck(), keras.layers.Dense(2, name="only")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("sgd", "mse")
callbacks = [Strike()]
if place in ("save", "thread"):
    saves = dtk.callbacks.Checkpoint("saved", save_freq=2, background=place == "thread")
    callbacks.append(saves)
model.fit(rows("fit"), verbose=0, callbacks=callbacks)
model.evaluate(rows("evaluate"), verbose=0, callbacks=callbacks[:1])
model.predict(((x,) for x, _ in rows("predict")), verbose=0, callbacks=callbacks[:1])
if me == "1" and place == "left":
    os._exit(0)
strategy.world.barrier()
print("done", flush=True)
"""


def job(tmp_path, place, how="sleep", communicator="collective", command=None):
    (tmp_path / "train.py").write_text(SCRIPT)
    run = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--stall-timeout", "4"]
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    allowed |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [*(command or [*run, "--communicator", communicator]), "train.py", place, how],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, **allowed, "DTK_STALL_TIMEOUT": "4", "DTK_CALIBRATE": "0"},
    )
    return done.returncode, done.stdout, done.stderr


def report(said):
    assert said.count("dtk: the job has stopped moving, and was ended.") == 1, said
    return said[said.index("dtk: the job has stopped moving, and was ended.") :]


@pytest.mark.parametrize("communicator", ["collective", "mpi"])
@pytest.mark.parametrize("place", ["import", "imported", "constructor", "build", "trace"])
def test_a_rank_that_sleeps_at_its_start_is_named_with_its_stack(tmp_path, place, communicator):
    if communicator == "mpi" and mpi_installs.mpirun() is None:
        pytest.skip("no mpi4py, or no mpirun beside python: pip install './dtk[mpi]'")
    code, _, said = job(tmp_path, place, communicator=communicator)
    assert code == 124, said
    last = report(said)
    assert "rank 1, host localhost, did nothing for 4 s " in last
    assert re.search(r'train.py", line \d+ in strike', last), "where it sleeps"
    where = {"trace": "train step 1", "build": r"collective \d+"}
    waits = where.get(place, f"the start of {communicator}")
    assert re.search(rf"\nrank 0 waits in {waits}\.\n$", last)


@pytest.mark.parametrize("place", ["evaluate", "predict"])
def test_a_rank_that_sleeps_elsewhere_than_in_fit(tmp_path, place):
    code, _, said = job(tmp_path, place)
    assert code == 124, said
    last = report(said)
    assert "rank 1, host localhost, did nothing for 4 s after " in last
    assert re.search(r'train.py", line \d+ in strike', last), "where it sleeps"
    step = "test" if place == "evaluate" else "predict"
    assert last.rstrip().endswith(f"rank 0 waits in {step} step 2.")


@pytest.mark.parametrize("place", ["save", "thread"])
def test_a_rank_that_sleeps_while_it_saves(tmp_path, place):
    """Also in the thread that writes, for which the next save waits."""
    code, _, said = job(tmp_path, place)
    assert code == 124, said
    last = report(said)
    assert "rank 0, host localhost, did nothing for 4 s after " in last
    assert re.search(r'train.py", line \d+ in strike', last), "where it sleeps"
    assert ("and of a thread that this one waits for:" in last) == (place == "thread")


def test_a_rank_whose_generator_sleeps(tmp_path):
    code, _, said = job(tmp_path, "data")
    assert code == 124, said
    last = report(said)
    assert "rank 1, host localhost, got no data for 4 s from Python in train step " in last
    assert re.search(r'train.py", line \d+ in rows', last), "where it sleeps"


@pytest.mark.parametrize("place", ["short evaluate", "short predict"])
def test_a_rank_whose_data_ends_before_that_of_others(tmp_path, place):
    code, _, said = job(tmp_path, place)
    assert code == 124, said
    named = "rank 1, host localhost, has come to the end of its data before the others, and waits "
    assert named in report(said)


def test_a_rank_that_leaves_its_script_is_named(tmp_path):
    code, _, said = job(tmp_path, "left")
    # TensorFlow may notice the end of a connection that it reads from, and name its other end.
    told = {124: "rank 1, host localhost, has left its script after ", 1: "task:1"}
    assert told[code] in said


def test_a_stopped_process_is_made_to_say_where_it_was(tmp_path):
    code, _, said = job(tmp_path, "evaluate", "stop")
    assert code == 124, said
    last = report(said)
    assert "rank 1, host localhost, reported nothing for 4 s, last " in last
    assert " It is stopped, as by SIGSTOP.\n" in last
    assert re.search(r'train.py", line \d+ in strike', last), "where it was stopped"


@pytest.mark.parametrize("place", ["import", "trace"])
def test_a_slow_start_is_no_stall(tmp_path, place):
    code, out, said = job(tmp_path, place, "busy")
    assert (code, out.count("done")) == (0, 2), said


@pytest.mark.parametrize("communicator", ["mpi", "horovod"])
@pytest.mark.parametrize("how", ["sleep", "stop", "busy"])
def test_a_rank_that_mpirun_has_started_and_that_makes_no_strategy(tmp_path, communicator, how):
    found = mpi_installs.mpirun() if communicator == "mpi" else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun for this communicator")
    command = [str(found), "--oversubscribe", "--bind-to", "none", "-np", "2", sys.executable]
    code, out, said = job(tmp_path, "import", how, command=command)
    if how == "busy":
        assert (code, out.count("done")) == (0, 2), said
        return
    assert code == 124, said
    last = report(said)
    assert re.search(r"rank 1, host \S+, did nothing for 4 s before it made a strategy", last)
    assert "rank 0 waits in the start of MPI." in last
