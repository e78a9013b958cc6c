"""Real jobs that lose a real task: nothing is counted twice, nothing hangs, nothing is lost."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dtk.cluster import TFConfig, startup_barrier
from dtk.errors import ClusterError, DtkError
from dtk.parameter_server.run_server import Chief
from dtk.strategies import ParameterServerStrategy

HERE = Path(__file__).resolve().parent


def job(workers, servers):
    run = [sys.executable, "-m", "dtk.cli.main", "run"]
    return [*run, "-n", str(workers), "--ps", str(servers)]


def run(*arguments, command, timeout=150, **environ):
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), **environ}
    return subprocess.run(
        [*command, str(HERE / "losing_tasks.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=env,
    )


@pytest.mark.parametrize("how", ["plain", "pipelines", "downpour"])
def test_a_killed_worker_loses_no_step_and_takes_part_again(tmp_path, how):
    done = run("worker:1", tmp_path, how, command=job(2, 2 if how == "plain" else 1))
    assert done.returncode == 0, done.stdout + done.stderr
    epochs, iterations = re.search(r"epochs (\d+) iterations (\d+)", done.stdout).groups()
    assert int(iterations) == 40 * int(epochs), "a step was lost, or applied twice"
    assert "seen again True" in done.stdout
    assert "worker 1" in done.stderr and "starting it again (1 of 3)" in done.stderr


def test_a_killed_server_ends_the_job_clearly_and_a_checkpoint_continues_it(tmp_path):
    """Also with fewer tasks than it had."""
    done = run("ps:1", tmp_path, command=job(2, 2))
    assert done.returncode != 0
    assert float(re.search(r"noticed after (\S+) s", done.stdout)[1]) < 30
    told = done.stdout + done.stderr
    assert "parameter server 1 (127.0.0.1:" in told and "Checkpoint(directory" in told
    again = run("nobody:0", tmp_path, command=job(1, 1))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming at epoch 3/4" in again.stdout
    assert "iterations 160" in again.stdout, "the first two epochs were saved"


def config(cluster, role, index=0, **extra):
    task = {"type": role, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task}), **extra}


def port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{door.getsockname()[1]}"


def gives_up(environ, *parts):
    """A process that starts TensorFlow, waits in vain and says for whom."""
    done = run("nobody:0", "unused", command=[sys.executable], timeout=60, **environ)
    assert done.returncode != 0
    for part in parts:
        assert part in done.stderr, done.stderr


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
    where = cluster["chief"][0]
    with pytest.raises(ClusterError, match=f"ps 0: no chief at {where} within 0.9 s"):
        Chief(TFConfig(cluster, "ps", 0)).await_()
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"dtk: ps 0: waiting for the chief, which does not answer at {where},")


def test_a_port_that_is_taken(refused):
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        taken = f"127.0.0.1:{door.getsockname()[1]}"
        cluster = {"chief": [port()], "worker": [port()], "ps": [taken]}
        refused(config(cluster, "ps"), taken, "in use by process")


def test_a_server_without_a_chief_does_not_wait_for_ever():
    cluster = {"chief": [port()], "worker": [port()], "ps": [port()]}
    gives_up(config(cluster, "ps", DTK_START_TIMEOUT="2"), "no chief at", cluster["chief"][0])
