"""What a user can get wrong, and what dtk says. Never a hang, never silence."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

import world as harness
from strategies import mistakes

pytestmark = pytest.mark.parametrize("backend, size", [("collective", 2)])


@pytest.mark.parametrize("name", list(mistakes.MISTAKES))
def test_every_rank_says_what_is_wrong(world, backend, size, name):
    kind, message = mistakes.EXPECTED[name]
    for rank, (raised, text) in enumerate(world(backend, size).run(mistakes.make, name)):
        assert raised == kind, f"rank {rank}: {raised}: {text}"
        for part in message:
            assert part.format(rank=rank) in text


def launched(tmp_path, backend, scripts, *, timeout=60):
    """Run one script per rank through `mpirun`, as a user could by accident."""
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    for i, script in enumerate(scripts):
        path = tmp_path / f"script_{i}.py"
        path.write_text(script)
        argv += [":"] if i else []
        argv += ["-np", "1", sys.executable, str(path)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, env=os.environ)


TRAIN = """
import dtk, keras, numpy as np
strategy = dtk.auto_strategy()
print("strategy made")
"""


@pytest.fixture
def mpi(backend, size):
    reason = harness.missing("horovod-mpi")
    if reason and os.environ.get("DTK_REQUIRE_HOROVOD") != "1":
        pytest.skip(reason)


def test_different_scripts_on_ranks(tmp_path, mpi, backend, size):
    ended = launched(tmp_path, backend, [TRAIN, TRAIN])
    assert ended.returncode != 0
    assert "ranks disagree on the script" in ended.stderr
    assert "script_0.py" in ended.stderr and "script_1.py" in ended.stderr
    assert "strategy made" not in ended.stdout


def test_a_script_that_makes_no_strategy(tmp_path, mpi, backend, size):
    script = tmp_path / "alone.py"
    script.write_text("import dtk, keras\nprint('trained')\n")
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    ended = subprocess.run(
        [*argv, sys.executable, str(script)], capture_output=True, text=True, timeout=60
    )
    assert "rank 1: this script made no strategy, so each of the 2 processes" in ended.stderr
    assert "dtk.auto_strategy()" in ended.stderr
    script.write_text("import dtk, keras\nraise ValueError('another mistake')\n")
    ended = subprocess.run(
        [*argv, sys.executable, str(script)], capture_output=True, text=True, timeout=60
    )
    assert "ValueError: another mistake" in ended.stderr
    assert "made no strategy" not in ended.stderr


def test_an_exception_on_one_rank_ends_all_at_once(tmp_path, mpi, backend, size):
    script = tmp_path / "fails.py"
    script.write_text(
        "import dtk\n"
        "strategy = dtk.auto_strategy()\n"
        "if strategy.rank == 1:\n"
        "    raise ArithmeticError('on purpose')\n"
        "strategy.communicator.barrier()\n"
    )
    argv = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    ended = subprocess.run(
        [*argv, sys.executable, str(script)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode != 0
    assert "ArithmeticError: on purpose" in ended.stderr
    assert "dtk: rank 1 on" in ended.stderr


DEVICES = """
import dtk, tensorflow as tf
tf.ones(1)
for devices in (2, 0, ["/gpu:7"], ["/cpu:0", "/cpu:1"]):
    try:
        dtk.strategies.MirroredStrategy(devices)
    except ValueError as error:
        print(error)
"""


def test_fewer_devices_than_asked(backend, size):
    """In a process of its own: TensorFlow makes logical devices before its first operation only."""
    ended = subprocess.run(
        [sys.executable, "-c", DEVICES], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    too_late, none, gpu, second = ended.stdout.splitlines()
    assert "devices=2, but TensorFlow has already started with 1 CPU device(s)" in too_late
    assert "make the strategy before anything else uses TensorFlow" in too_late
    assert "devices=0 is not a number of devices; use 1 or more" in none
    assert "device '/gpu:7' does not exist; there are " in gpu
    assert "device '/cpu:1' does not exist" in second
    assert "device:cpu:0" in second


RAISES_AT_STEP_3 = """
import os, time
import dtk, keras, numpy as np

strategy = dtk.auto_strategy()

class Failing(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 3:
            print("pid", os.getpid(), time.time(), flush=True)
            if strategy.rank == 1:
                raise ArithmeticError("on purpose")

keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
model.fit(np.ones((64, 4)), np.ones((64, 2)), batch_size=8, verbose=0, callbacks=[Failing()])
print("trained", flush=True)
"""


def test_an_exception_in_the_middle_of_fit_ends_dtk_run(tmp_path, backend, size):
    """Rank 0 has begun a step by then, and waits in a sum for what rank 1 will never send."""
    script = tmp_path / "train.py"
    script.write_text(RAISES_AT_STEP_3)
    argv = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", str(script)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=90)
    now = time.time()
    assert ended.returncode not in (0, 2)
    assert "trained" not in ended.stdout
    said = [line.split() for line in ended.stdout.splitlines() if "pid" in line]
    assert sorted(words[0] for words in said) == ["[0]", "[1]"], ended.stdout
    for _, _, pid, raised in said:
        assert now - float(raised) < 10
        assert not psutil.pid_exists(int(pid))
    last = ended.stderr[ended.stderr.rindex("Traceback") :]
    assert "ArithmeticError: on purpose" in last
    assert "[0]" not in last
