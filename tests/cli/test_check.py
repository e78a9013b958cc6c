"""`dtk check`: a script's step, up to its first update, on two processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.command

SCRIPT = """
import dtk, keras, numpy as np, tensorflow as tf
strategy = dtk.auto_strategy()
keras.utils.set_random_seed(1)
def loss(y, p):
    return {loss}
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), {layers}keras.layers.Dense(1)])
    model.compile("sgd", loss)
x = np.random.default_rng(0).random((16, 3), "float32")
if {trains}:
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    print("trained to the end")
"""


def check(*arguments, command="check"):
    called = [sys.executable, "-m", "dtk.cli.main", command, *arguments]
    return subprocess.run(called, capture_output=True, text=True, timeout=100, check=False)


def checked(tmp_path, layers="", trains=True):
    script = tmp_path / "train.py"
    loss = "tf.reduce_mean(tf.square(y - p))"
    script.write_text(SCRIPT.format(loss=loss, layers=layers, trains=trains))
    return check(str(script))


@pytest.mark.full("a whole command: one of each kind")
def test_a_step_that_adds_up(tmp_path):
    done = checked(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "dtk: self-test of model 'sequential' (loss loss): 5 rows as a whole" in done.stdout
    assert "trained to the end" not in done.stdout


def test_a_step_that_does_not(tmp_path):
    done = checked(tmp_path, layers="keras.layers.Softmax(axis=0), ")
    assert done.returncode == 1
    assert "layer softmax along axis 0" in done.stderr
    assert "Nothing was updated" in done.stderr


@pytest.mark.full("a whole command: one of each kind")
def test_a_script_that_trains_nothing(tmp_path):
    done = checked(tmp_path, trains=False)
    assert done.returncode == 1
    assert "dtk check: the script ended without training a model" in done.stderr


@pytest.mark.parametrize(("command", "code"), [("check", 1), ("tune", 2)])
def test_a_script_that_makes_no_strategy(tmp_path, command, code):
    """`dtk check` said that all is well, and `dtk tune` that a file of its own is not there."""
    script = tmp_path / "train.py"
    script.write_text("if __name__ == 'main': train()")
    done = check(str(script), command=command)
    assert done.returncode == code
    assert f"dtk {command}: the script ended without making a strategy" in done.stderr


LATE = """
import dtk, time
rank = dtk.cluster.detect().rank
time.sleep(1000 * rank)
dtk.auto_strategy()
"""


@pytest.mark.parametrize("command", ["check", "tune"])
def test_a_rank_that_never_comes(tmp_path, command):
    """Nobody watched: the command hung for ever."""
    script = tmp_path / "train.py"
    script.write_text(LATE)
    done = check("--stall-timeout", "3", str(script), command=command)
    assert done.returncode == (124 if command == "check" else 2), done.stderr
    assert "the job has stopped moving" in done.stderr
    assert "rank 1, host localhost, did nothing for 3 s" in done.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["-n", "1", __file__], "-n 1: there is something to compare from 2 on"),
        ([], "no script given"),
        (["--stall-timeout", "0.5", __file__], "--stall-timeout 0.5: expected 1 to 1000000"),
    ],
)
def test_mistakes(arguments, said):
    done = check(*arguments)
    assert done.returncode == 2
    assert said in done.stderr and "dtk check: " in done.stderr
