"""Tasks of real jobs with parameter servers that stop, sleep or are slow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

SCRIPT = """
import json, os, signal, sys, time
import keras, numpy as np, tensorflow as tf

here, consistency, victims, backup = sys.argv[1:]
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = task["type"] + str(task["index"])
if victims == name + " starts" and not os.path.exists(os.path.join(here, name)):
    open(os.path.join(here, name), "w").close()
    time.sleep(600)
pipe = os.path.join(here, "pipe")
if name == "worker1" and victims == "worker1 reads":
    # The first worker 1 reads a pipe that nobody writes to, its successor a file.
    if os.path.exists(pipe):
        os.remove(pipe)
        open(pipe, "w").close()
    else:
        os.mkfifo(pipe)
with open(os.path.join(here, name), "w") as file:
    file.write(str(os.getpid()))

import dtk
if int(backup):
    consistency = dtk.strategies.Sync(backup_workers=int(backup))
strategy = dtk.strategies.ParameterServerStrategy(consistency)

class Slow(keras.layers.Layer):
    def call(self, x):
        if victims != "slow":
            return x
        # Long enough to be a stall, if it were one; the loop keeps a core busy.
        many = tf.while_loop(lambda i, y: i < 500_000, lambda i, y: (i + 1, y * 1.0), (0, x[0, 0]))
        return x + 0.0 * many[1]

with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(2, name="only")])
    model.compile("sgd", "mse")

class Strike(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch != (1 if victims == "slow" else 3) or os.path.exists(os.path.join(here, "struck")):
            return
        open(os.path.join(here, "struck"), "w").close()
        if victims == "sleep":
            time.sleep(600)
        elif victims == "slow":
            over = time.time() + 9
            while time.time() < over:
                sum(range(10_000))
        elif not " " in victims:
            for one in victims.split(","):
                with open(os.path.join(here, one)) as file:
                    os.kill(int(file.read()), signal.SIGSTOP)

def rows(context):
    def read(row):
        if context.input_pipeline_id == 1:
            length = tf.cast(tf.strings.length(tf.io.read_file(pipe)), "float32")
            return tf.ones((4, 4)), tf.ones((4, 2)) + length
        return tf.ones((4, 4)), tf.ones((4, 2))
    return tf.data.Dataset.range(8).map(read)

began = time.time()
arguments = {"verbose": 0, "epochs": 2, "callbacks": [Strike()]}
if victims == "worker1 reads":
    model.fit(strategy.distribute_datasets_from_function(rows), steps_per_epoch=16, **arguments)
else:
    batches = 2 if victims == "slow" else 16
    data = np.ones((batches * 4, 4)), np.ones((batches * 4, 2))
    model.fit(*data, batch_size=4, **arguments)
print("done", int(model.optimizer.iterations.numpy()))
print("fit took", time.time() - began)
"""


def job(tmp_path, victims, consistency="async", workers=2, backup=0, *options):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = [sys.executable, "-m", "dtk.cli.main", "run", "-n", str(workers), "--ps", "1"]
    began = time.monotonic()
    done = subprocess.run(
        [*run, "--stall-timeout", "4", "--timeout-grace", "1", *options, str(script)]
        + [str(tmp_path), consistency, victims, str(backup)],
        capture_output=True,
        text=True,
        timeout=150,
        env=dict(os.environ),
    )
    assert time.monotonic() - began < 90, done.stderr
    return done


@pytest.mark.parametrize(
    "victims, workers, backup",
    # The second: two stop where one backup worker lets the job bear one.
    [("worker1", 2, 0), ("worker0,worker1", 3, 1)],
)
def test_stopped_workers_are_ended_and_their_work_goes_to_another(
    tmp_path, victims, workers, backup
):
    done = job(tmp_path, victims, "sync", workers, backup)
    assert (done.returncode, "done 32\n" in done.stdout) == (0, True), done.stderr
    for victim in victims.split(","):
        worker = int(victim[-1])
        assert (
            f"dtk run: rank {worker + 1} (worker {worker}) has reported nothing for 4 s, and was "
            "ended; starting it again (1 of 3)\n" in done.stderr
        )


def test_the_job_ends_with_the_last_worker_that_is_stopped(tmp_path):
    done = job(tmp_path, "worker0,worker1", "async", 2, 0, "--max-restarts", "0")
    assert done.returncode == 124, done.stderr
    assert "has reported nothing for 4 s, and was ended; no worker is left" in done.stderr


def test_a_worker_that_does_nothing_with_its_work_is_ended(tmp_path):
    done = job(tmp_path, "worker1 reads")
    assert (done.returncode, "done 32\n" in done.stdout) == (0, True), done.stderr
    lost = "rank 2 (worker 1) has done nothing for 4 s, though it had work, and was ended; starting"
    assert lost in done.stderr


def test_a_worker_that_sleeps_at_its_start_is_started_again(tmp_path):
    done = job(tmp_path, "worker1 starts")
    assert (done.returncode, "done 32\n" in done.stdout) == (0, True), done.stderr
    lost = "rank 2 (worker 1) has done nothing for 4 s since its start, and was ended; starting it"
    assert lost in done.stderr
    assert "the stack of rank 2, the innermost call first:\n  File " in done.stderr


def test_a_server_that_sleeps_at_its_start_ends_the_job(tmp_path):
    done = job(tmp_path, "ps0 starts")
    assert done.returncode == 124, done.stderr
    assert "ps 0, host localhost, did nothing for 4 s before it made a" in done.stderr
    assert f'File "{tmp_path}/train.py", line ' in done.stderr


@pytest.mark.parametrize(
    "victim, said",
    [
        ("ps0", "ps 0, host localhost, reported nothing for 4 s, last in service."),
        ("sleep", "rank 0, host localhost, did nothing for 4 s after work of the workers 4.\nIts"),
    ],
)
def test_a_stopped_server_or_chief_ends_the_job(tmp_path, victim, said):
    done = job(tmp_path, victim)
    assert done.returncode == 124, done.stderr
    last = done.stderr[done.stderr.index("dtk: the job has stopped moving, and was ended.") :]
    assert said in last
    assert ("in on_train_batch_end" in last) == (victim == "sleep")


def test_what_is_slow_is_not_ended(tmp_path):
    """A step on a worker and a callback on the chief, each longer than the limit."""
    done = job(tmp_path, "slow")
    assert done.returncode == 0, done.stderr
    assert "done 4\n" in done.stdout and "ended" not in done.stderr
    took = float(re.search(r"fit took (\S+)", done.stdout)[1])
    assert took > 9 + 2 * 4, "the callback takes 9 s, and each worker takes two steps"
