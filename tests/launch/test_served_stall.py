"""Workers of real jobs with servers that stop, wait or are slow; see also `test_stall_phases`."""

from __future__ import annotations

import re
import time

import pytest

from support.launched import dtk_run

pytestmark = [
    pytest.mark.command,
    pytest.mark.full("ranks of plain Python are missing in the same ways"),
]

SCRIPT = """
import json, os, signal, sys, time
import keras, numpy as np, tensorflow as tf

here, consistency, victims, backup = sys.argv[1:]
task = json.loads(os.environ["TF_CONFIG"])["task"]
name = task["type"] + str(task["index"])
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
        over = tf.timestamp() + 5.0
        last = tf.while_loop(lambda now: now < over, lambda now: [tf.timestamp()], [over - 5.0])
        return x + 0.0 * tf.stop_gradient(tf.cast(last[0], x.dtype))

with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), Slow(), keras.layers.Dense(2, name="only")])
    model.compile("sgd", "mse")

class Strike(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch != (1 if victims == "slow" else 3) or os.path.exists(os.path.join(here, "struck")):
            return
        open(os.path.join(here, "struck"), "w").close()
        if victims == "slow":
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
    how = ("-n", workers, "--ps", 1, "--stall-timeout", 4, "--timeout-grace", 1, *options)
    began = time.monotonic()
    done = dtk_run(*how, script, tmp_path, consistency, victims, backup, timeout=150)
    assert time.monotonic() - began < 90, done.stderr
    return done


def test_two_workers_stop_where_one_backup_worker_lets_the_job_bear_one(tmp_path):
    done = job(tmp_path, "worker0,worker1", "sync", 3, 1)
    assert (done.returncode, "done 32\n" in done.stdout) == (0, True), done.stderr
    for worker in range(2):
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


def test_what_is_slow_is_not_ended(tmp_path):
    """A step on a worker and a callback on the chief, each longer than the limit."""
    done = job(tmp_path, "slow")
    assert done.returncode == 0, done.stderr
    assert "done 4\n" in done.stdout and "ended" not in done.stderr
    took = float(re.search(r"fit took (\S+)", done.stdout)[1])
    assert took > 9 + 5, "the callback of one epoch, and the steps of the next"
