"""Ranks of plain Python that watch each other without a launcher; see strategies/test_watching."""

import multiprocessing.connection
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from dtk.cluster import line, pmix

pytestmark = pytest.mark.command

RANK = """
import os, signal, sys, time
from dtk.cluster import heartbeats, progress
rank, victim, how, port, secret = sys.argv[1:]
if rank == "0":
    listener = heartbeats.Listener("127.0.0.1")
    print(listener.port, listener.secret.hex(), flush=True)
    clients = listener.accept_clients(2, 30.0)
    print("met", flush=True)
    heartbeats.Table(heartbeats.Watched(0, ["a", "b"], clients, 2.0))
else:
    line = heartbeats.connect(1, ["127.0.0.1"], int(port), bytes.fromhex(secret))
    input()  # as strategies wait, before they report
    heartbeats.Client(heartbeats.Watched(1, ["a", "b"], {0: line}, 2.0))
with progress.inside("train step"):
    time.sleep(0.5)
def struck():
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how.startswith("leave"):
        if how == "leave a child" and not os.fork():
            os.closerange(0, 3)
            time.sleep(6)  # and holds what this rank has open, if nobody closes it
        os._exit(0)
    time.sleep(600)
if rank == victim:
    struck()
with progress.inside("train step"):
    time.sleep(600)
"""


# As where an engine calls the script in a thread: it reports then, and not the main thread.
IN_A_THREAD = f"import threading; threading.Thread(target=exec, args=({RANK!r}, {{}})).start()"


@pytest.mark.full_for("1-leave-*", "1-stop-*")
@pytest.mark.parametrize(
    ("victim", "how", "told"),
    [
        ("1", "sleep in a thread", "did nothing for 2 s after train step 1."),
        ("1", "sleep", "did nothing for 2 s after train step 1."),
        ("1", "stop", "reported nothing for 2 s, last "),
        ("0", "stop", "reported nothing for 2 s, last "),
        ("1", "leave", "has left its script after train step 1, and every rank must run"),
        ("1", "leave a child", "has left its script after train step 1, and every rank must run"),
    ],
)
def test_a_missing_rank_is_named_once_and_the_job_ends(tmp_path, victim, how, told):
    code = IN_A_THREAD if "thread" in how else RANK

    def start(rank, *known):
        with open(tmp_path / rank, "w") as said:
            return subprocess.Popen(
                [sys.executable, "-c", code, rank, victim, how, *known],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, "DTK_RUN": ""},
            )

    first = start("0", "", "")
    ranks = [first, start("1", *first.stdout.readline().split())]
    try:
        assert first.stdout.readline() == "met\n"
        ranks[1].stdin.write("\n")
        ranks[1].stdin.flush()
        other = ranks[1 - int(victim)]
        assert other.wait(30) == 124
        if how == "stop":
            ranks[int(victim)].send_signal(signal.SIGKILL)
        assert ranks[int(victim)].wait(30) == {"leave": 0, "stop": -9}.get(how[:5].strip(), 124)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    said = "".join((tmp_path / rank).read_text() for rank in "01")
    assert said.count("dtk: the job has stopped moving") == 1
    assert told in said
    assert said.index(f"rank {victim}, host ") < said.index(f"rank {1 - int(victim)} waits in")
    if "sleep" in how:
        assert ' in struck\n  File "<string>"' in said, "its stack"


FAILS = """
import os, sys, threading, time
from dtk.cluster import failures, heartbeats
rank, port, secret, ends = sys.argv[1], *sys.argv[2:4], dict(one.split("=") for one in sys.argv[4:])
if rank == "0":
    listener = heartbeats.Listener("127.0.0.1")
    print(listener.port, listener.secret.hex(), flush=True)
    clients = listener.accept_clients(3, 30.0)
    print("met", flush=True)
    heartbeats.Table(heartbeats.Watched(0, ["a", "b", "c"], clients, 60.0))
else:
    line = heartbeats.connect(int(rank), ["127.0.0.1"], int(port), bytes.fromhex(secret))
    input()
    heartbeats.Client(heartbeats.Watched(int(rank), ["a", "b", "c"], {0: line}, 60.0))
seconds, _, kind = ends[rank].partition(":")
time.sleep(float(seconds))
if kind == "killed":
    os.kill(os.getpid(), 9)
error = {"wrong": ValueError("boom"), "lost": ConnectionError("Socket closed")}[kind]
print("knows", failures.tell(failures.of(error)), flush=True)
os._exit(1)
"""


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        (["0=0.9:lost", "1=0.5:wrong", "2=0.7:lost"], "rank 1, host b, failed first: ValueError:"),
        # its peers notice before it has told
        (["0=0.2:lost", "1=1.5:wrong", "2=0.2:lost"], "rank 1, host b, failed first: ValueError:"),
        (["0=0.2:wrong", "1=0.8:lost", "2=0.8:lost"], "rank 0, host a, failed first: ValueError:"),
        (["0=0.9:lost", "1=0.9:lost", "2=0.2:killed"], "rank 2, host c, was gone first, and told"),
        (["0=0.2:killed", "1=0.5:lost", "2=0.5:lost"], "rank 0, host a, was gone first, and told"),
    ],
)
def test_all_survivors_learn_who_failed_first(ends, first):
    """Breaks as the words of a rank that only lost another one, under mpirun and the like."""

    def start(rank, *known):
        return subprocess.Popen(
            [sys.executable, "-c", FAILS, rank, *known, *ends],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "DTK_RUN": ""},
        )

    ranks = [start("0", "", "")]
    try:
        known = ranks[0].stdout.readline().split()
        ranks += [start(one, *known) for one in "12"]
        assert ranks[0].stdout.readline() == "met\n"
        for rank in ranks[1:]:
            rank.stdin.write("\n")
            rank.stdin.flush()
        told = [one.communicate(timeout=20) for one in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    survivors = [one for rank, one in enumerate(told) if f"{rank}=0.2:killed" not in ends]
    assert all(f"knows {first}" in out for out, _ in survivors), told
    says = survivors[0][1]
    # on a line of its own: a progress bar may stand in the last
    assert says.startswith(f"\ndtk: {first}") and says.count("\n") == 2


ACCEPTS = """
import os, time
from dtk.cluster import heartbeats
listener = heartbeats.Listener("")
print(listener.port, listener.secret.hex(), os.getpid(), os.uname().nodename, flush=True)
clients = listener.accept_clients(2, 30.0)
time.sleep(600)
"""


def test_a_connection_ends_once_a_host_is_silent_and_not_while_a_process_is_stopped(many_hosts):
    """A rank beyond a link that was cut was awaited for ever."""
    (host,), shell = many_hosts(1)
    command = [shell, host, f"cd {os.getcwd()} && {sys.executable} -c '{ACCEPTS}'"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        port, secret, pid, name = other.stdout.readline().split()
        to_it = line.reach((host, int(port)), bytes.fromhex(secret), 1)
        with to_it.end as end:
            to_it.end_at_silence(1.0)
            end.settimeout(3.0)
            os.kill(int(pid), signal.SIGSTOP)
            to_it.send({"here": True})
            with pytest.raises(TimeoutError, match="timed out"):
                to_it.receive()
            subprocess.run(["ip", "link", "set", f"{name[:-1]}v{name[-1]}", "down"], check=True)
            to_it.send({"here": True})
            end.settimeout(20.0)
            with pytest.raises(OSError, match="Connection timed out|No route to host"):
                to_it.receive()
        os.kill(int(pid), signal.SIGKILL)


def test_a_stopped_process_that_takes_no_more_is_not_silent_and_keeps_nobody():
    """Rank 0 in a debugger, to which the others report for hours, was taken for gone."""
    with subprocess.Popen([sys.executable, "-c", ACCEPTS], stdout=subprocess.PIPE, text=True) as it:
        port, secret, *_ = it.stdout.readline().split()
        to_it = line.reach(("127.0.0.1", int(port)), bytes.fromhex(secret), 1)
        with to_it.end:
            to_it.probe()
            it.send_signal(signal.SIGSTOP)
            begun = time.monotonic()
            for _ in range(2000):
                to_it.offer({"stack": "x" * 10_000})
            assert time.monotonic() - begun < 5.0
            time.sleep(3.0)
            assert to_it.silence() < 2.5
        it.kill()


def test_a_stranger_that_says_nothing_keeps_no_machine_from_the_first_one():
    first, here = pmix.OtherMachines(2, 0, "secret"), pmix.OtherMachines(2, 1, "secret")
    first.listen([0])
    address = ("127.0.0.1", first.ends()[0].getsockname()[1])
    strangers = [socket.create_connection(address) for _ in range(6)]
    serving = threading.Event()

    def serve():
        while not serving.is_set():
            first.hear(multiprocessing.connection.wait(first.ends(), 0.1))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        begun = time.monotonic()
        here.connect(*address)
        assert time.monotonic() - begun < 3.0
    finally:
        serving.set()
        thread.join()
        for end in [*strangers, *first.ends(), *here.ends()]:
            if isinstance(end, socket.socket):
                end.close()
