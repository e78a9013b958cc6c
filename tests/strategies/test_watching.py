"""Ranks that watch each other where `dtk run` does not: the missing one is named, and all end."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from dtk.cluster import mpi_installs
from dtk.cluster.heartbeats import Line, Listener, connect
from dtk.errors import ClusterError
from dtk.strategies import start

SCRIPT = """
import os, signal, sys, time
import dtk, keras, numpy as np
communicator, how = sys.argv[1:]
strategy = dtk.strategies.AllReduceStrategy(communicator, stall_timeout=4)
with open(f"pid{strategy.rank}", "w") as file:
    file.write(str(os.getpid()))
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="only")])
    model.compile("sgd", "mse")
class Strike(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch != 1 or strategy.rank != 1:
            return
        if how == "sleep":
            time.sleep(600)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "busy":
            began = time.time()
            while time.time() - began < 9:
                sum(range(10_000))
data = np.ones((16, 4)), np.ones((16, 2))
model.fit(*data, batch_size=4, epochs=2, verbose=0, callbacks=[Strike()])
if how == "alone" and strategy.rank == 0:
    time.sleep(9)  # others have ended
print("done", flush=True)
"""
KINDS = ("out", "err")
ENVIRON = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "DTK_CALIBRATE": "0"}
ENVIRON |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENVIRON |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun(which, communicator, how, tmp_path):
    """One command; its exit code, and all that was said."""
    options = ["--oversubscribe", "--bind-to", "none", "-np", "2"]
    command = [str(which), *options, sys.executable, "train.py", communicator, how]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=90,
        cwd=tmp_path,
        env={**os.environ, **ENVIRON},
    )
    return [done.returncode], done.stdout, done.stderr


def by_hand(communicator, how, tmp_path):
    """A process for each rank, by TF_CONFIG; those that still run at last are ended."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    addresses = [f"127.0.0.1:{server.getsockname()[1]}" for server in servers]
    ranks = []
    for index, server in enumerate(servers):
        server.close()
        task = {"type": "worker", "index": index}
        place = json.dumps({"cluster": {"worker": addresses}, "task": task})
        with open(tmp_path / f"out{index}", "w") as out, open(tmp_path / f"err{index}", "w") as err:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "train.py", communicator, how],
                    stdout=out,
                    stderr=err,
                    cwd=tmp_path,
                    env={**os.environ, **ENVIRON, "TF_CONFIG": place},
                )
            )
    try:
        first, last = ranks
        codes = {first.wait(timeout=120)}
        if how == "stop":
            last.kill()
        codes.add(last.wait(timeout=20))
        said = ["".join((tmp_path / f"{one}{i}").read_text() for i in (0, 1)) for one in KINDS]
        return sorted(codes - {-signal.SIGKILL}), *said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def started(launcher, how, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    if launcher == "mpi":
        if mpi_installs.mpirun() is None:
            pytest.skip("no mpi4py, or no mpirun beside python: pip install './dtk[mpi]'")
        return mpirun(mpi_installs.mpirun(), "mpi", how, tmp_path)
    if launcher == "horovod":
        if shutil.which("mpirun") is None:
            pytest.skip("no mpirun: install Debian's openmpi-bin and libopenmpi-dev")
        return mpirun(shutil.which("mpirun"), "horovod", how, tmp_path)
    return by_hand("collective", how, tmp_path)


@pytest.mark.full  # ranks of plain Python are missing in the same ways: cluster/test_heartbeats.py
@pytest.mark.parametrize(
    "launcher, how", [("mpi", "sleep"), ("horovod", "sleep"), ("collective", "stop")]
)
def test_a_missing_rank_is_named_once_and_the_job_ends(tmp_path, launcher, how):
    codes, out, err = started(launcher, how, tmp_path)
    assert codes == [124], err
    assert "done" not in out
    last = err[err.index("dtk: the job has stopped moving, and was ended.") :]
    assert err.count("has stopped moving") == 1
    if how == "sleep":
        assert "did nothing for 4 s after collective " in last
        assert re.search(r'train.py", line \d+ in on_epoch_begin', last), "where it sleeps"
    else:
        assert "reported nothing for 4 s, last " in last
    assert last.index("rank 1, host ") < last.index("rank 0 waits in train step 5.")


@pytest.mark.full
@pytest.mark.parametrize("how", ["busy", "alone"])
def test_what_is_slow_or_outlasts_the_others_is_no_stall(tmp_path, how):
    codes, out, err = started("collective", how, tmp_path)
    assert codes == [0], err
    assert "done" in out


# The connection.


def meet(secret_of=lambda secret: secret):
    listener = Listener("127.0.0.1")
    found = []

    def knock():
        found.append(connect(1, ["127.0.0.1"], listener.port, secret_of(listener.secret)))

    thread = threading.Thread(target=knock)
    thread.start()
    clients = listener.accept_clients(2, 3.0)
    thread.join()
    return clients, found[0]


def hang_up(*lines):
    for line in lines:
        line.end.close()


def test_messages_pass_both_ways_in_order():
    clients, line = meet()
    for number in range(3):
        line.send({"number": number})
        clients[1].send({"number": -number})
    time.sleep(0.1)
    assert [message["number"] for message in clients[1].receive()] == [0, 1, 2]
    assert [message["number"] for message in line.receive()] == [0, -1, -2]
    hang_up(line, clients[1])


def test_who_does_not_know_the_secret_is_not_let_in():
    clients, line = meet(lambda secret: bytes(32))
    assert clients == {}
    hang_up(line)


def test_a_message_that_was_said_before_is_refused():
    ours, theirs = socket.socketpair()
    line = Line(ours, b"secret", b"nonces", is_listener=True)
    said = Line(theirs, b"secret", b"nonces", is_listener=False)
    said.send({"rank": 1})
    once = ours.recv(1000, socket.MSG_PEEK)
    theirs.sendall(once)
    with pytest.raises(PermissionError):
        line.receive()
    hang_up(line, said)


def test_what_a_timeout_may_be(monkeypatch):
    monkeypatch.delenv("DTK_STALL_TIMEOUT", raising=False)
    assert [start.checked_timeout(given) for given in (None, 0, 7)] == [300.0, 0.0, 7.0]
    with pytest.raises(ValueError, match=r"stall_timeout=0\.5: expected 1 second or more, or 0"):
        start.checked_timeout(0.5)
    monkeypatch.setenv("DTK_STALL_TIMEOUT", "60")
    assert start.checked_timeout(None) == 60.0
    for wrong in ("soon", "nan", "-1"):
        monkeypatch.setenv("DTK_STALL_TIMEOUT", wrong)
        with pytest.raises(ClusterError, match="DTK_STALL_TIMEOUT='" + wrong):
            start.checked_timeout(None)
