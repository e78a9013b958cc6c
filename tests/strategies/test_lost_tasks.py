"""Jobs that lose a task, or lack one: nothing is counted twice, nothing hangs, nothing is lost."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest
import tensorflow as tf

from dtk.cluster import TFConfig, startup_barrier
from dtk.errors import ClusterError, DtkError
from dtk.parameter_server.run_server import Chief
from dtk.strategies import ParameterServerStrategy

from support.bodies import digits, served_with
from support.served_bodies import LostWorker

pytestmark = pytest.mark.command

HERE = Path(__file__).resolve().parent


def fit_and_lose_a_worker(how):
    """Train until a worker that was killed after 20 steps takes part again, or for 40 s.

    Epochs and steps of the optimizer, whether it was back, and what was printed.
    """
    strategy = served_with("sync" if how == "pipelines" else "async")
    lost = LostWorker(strategy, 1)

    class Kill(keras.callbacks.Callback):
        killed = None

        def on_train_batch_end(self, batch, logs=None):
            if self.killed:
                time.sleep(0.02)  # a task needs seconds to come back, whatever is trained meanwhile
            elif batch == 20:
                lost.kill()
                self.killed = time.monotonic()

        def on_epoch_end(self, epoch, logs=None):
            over = time.monotonic() - self.killed > 40
            self.model.stop_training = lost.is_back(after=10) or over

    x, y = (a[:640] for a in digits())
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def rows(context):
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)

    data = {"x": x, "y": y, "batch_size": 16}
    if how == "pipelines":
        data = {"x": strategy.distribute_datasets_from_function(rows)}
        data |= {"steps_per_epoch": 40, "shuffle": False}
    with contextlib.redirect_stderr(io.StringIO()) as said:
        history = model.fit(**data, epochs=10_000, verbose=0, callbacks=[Kill()]).history
    steps = int(model.optimizer.iterations.numpy())
    return len(history["loss"]), steps, lost.is_back(after=10), said.getvalue()


@pytest.mark.full_but("served-2-pipelines")
@pytest.mark.worlds(("served", 2))
@pytest.mark.parametrize("how", ["plain", "pipelines"])
def test_a_killed_worker_loses_no_step_and_takes_part_again(pool, how):
    """Synchronous workers that read for themselves take turns, which must not wait for the lost."""
    ((epochs, iterations, is_back, said),) = pool.run(fit_and_lose_a_worker, how, timeout=90)
    assert iterations == 40 * epochs, "a step was lost, or applied twice"
    assert is_back
    assert said.count("dtk: worker 1 (127.0.0.1:") == said.count("is lost") == 1, said


def run(*arguments, command):
    return subprocess.run(
        [*command, str(HERE / "losing_tasks.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150,
    )


def job(workers, servers):
    run = [sys.executable, "-m", "dtk.cli.main", "run"]
    return [*run, "-n", str(workers), "--ps", str(servers)]


@pytest.mark.full("minutes of training; other tests kill tasks of a job")
def test_a_killed_server_ends_the_job_clearly_and_a_checkpoint_continues_it(tmp_path):
    """Also with fewer tasks than it had."""
    done = run(tmp_path, "ps:1", command=job(2, 2))
    assert done.returncode != 0
    assert float(re.search(r"noticed after (\S+) s", done.stdout)[1]) < 30
    told = done.stdout + done.stderr
    assert "parameter server 1 (127.0.0.1:" in told and "Checkpoint(directory" in told
    again = run(tmp_path, command=job(1, 1))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming at epoch 3/4" in again.stdout
    assert "iterations 160" in again.stdout, "the first two epochs were saved"


def config(cluster, role):
    task = {"type": role, "index": 0}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


def port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{door.getsockname()[1]}"


@pytest.fixture
def refused(monkeypatch):
    """What is refused before anything starts, and so in this process."""

    def refused(environ, *parts):
        for name, value in {**environ, "DTK_START_TIMEOUT": "2"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(DtkError) as raised:
            ParameterServerStrategy("async")
        for part in parts:
            assert part in str(raised.value)

    return refused


def test_no_job_at_all(refused):
    refused({"TF_CONFIG": ""}, "needs TF_CONFIG", "dtk run -n 2 --ps 1 train.py")


def test_no_server_no_worker_no_chief(refused):
    refused(config({"chief": [port()], "worker": [port()]}, "chief"), "no parameter server")
    refused(config({"chief": [port()], "ps": [port()]}, "chief"), "no worker")
    refused(config({"worker": [port()], "ps": [port()]}, "ps"), "no chief")


def test_two_evaluators(refused):
    cluster = {"chief": [port()], "worker": [port()], "ps": [port()]}
    refused(config({**cluster, "evaluator": [port(), port()]}, "chief"), "2 evaluators", "at most")


def test_a_task_that_does_not_come_up_is_named_with_its_address(refused, monkeypatch, capsys):
    """Meanwhile, too: nothing was said for two minutes."""
    monkeypatch.setattr(startup_barrier, "AFTER", 0.1)
    cluster = {"chief": [port()], "worker": [port()], "ps": [port()]}
    names = f"ps 0 ({cluster['ps'][0]}), worker 0 ({cluster['worker'][0]})"
    refused(config(cluster, "chief"), f"not there after 2 s: {names}")
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"dtk: chief: waiting for {names}, for 2 s more ")


def test_a_server_says_where_it_waits_for_the_chief(monkeypatch, capsys):
    cluster = {"chief": [port()], "worker": [port()], "ps": [port()]}
    monkeypatch.setattr(startup_barrier, "AFTER", 0.1)
    monkeypatch.setenv("DTK_START_TIMEOUT", "0.9")
    where = re.escape(f"chief ({cluster['chief'][0]})")
    with pytest.raises(ClusterError, match=f"^ps 0: not there after 0.9 s: {where}. Did they"):
        Chief(TFConfig(cluster, "ps", 0)).await_()
    (said,) = capsys.readouterr().err.splitlines()
    assert re.match(f"dtk: ps 0: waiting for {where}, for ", said)


def test_a_port_that_is_taken(refused):
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        taken = f"127.0.0.1:{door.getsockname()[1]}"
        cluster = {"chief": [port()], "worker": [port()], "ps": [taken]}
        refused(config(cluster, "ps"), taken, "in use by process")
