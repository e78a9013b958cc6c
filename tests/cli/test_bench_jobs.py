"""Jobs of `dtk bench` are placed, start, take turns, rest, and are never left behind."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from dtk.bench import bench_jobs, turns
from dtk.bench.bench_jobs import BenchJob, JobLost, Places, command, place
from dtk.bench.results import Setting, read
from dtk.bench.worker import CORES
from dtk.cli.main import main
from dtk.cluster import Host
from dtk.errors import ClusterError
from dtk.launch import Process, job_processes, ssh

from support.launched import pids

pytestmark = pytest.mark.command

FACTS = {
    "node1": ssh.HostFacts((4001,), (0, 1), "eth0"),
    "node2": ssh.HostFacts((4002, 4003), (0, 1), "ib0"),
    "node3": ssh.HostFacts((4004,), (0, 1), ""),
}
HOSTS = (Host("node1", 1), Host("node2", 2), Host("node3", 1))


@pytest.fixture
def surveyed(monkeypatch):
    """Hosts that are as FACTS say."""
    monkeypatch.setattr(ssh, "survey", lambda host, ports, **_: FACTS[host])


def test_pytorch_meets_at_rank_0_by_the_interface_of_each_host(surveyed):
    for rank, process in enumerate(place("collective", ["python"], Places(4, HOSTS))):
        given = process.env
        assert (given["RANK"], given["WORLD_SIZE"]) == (str(rank), "4")
        assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("node1", "4001")
        assert given.get("GLOO_SOCKET_IFNAME", "") == FACTS[process.host].interface
    assert all("MASTER_PORT" not in p.env for p in place("horovod", ["python"], Places(4, HOSTS)))


def test_on_this_machine_it_stays_on_loopback():
    first, second = place("collective", ["python"], Places(2))
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": first.address.rpartition(":")[2]}
    given["GLOO_SOCKET_IFNAME"] = "lo"
    assert first.env.items() >= given.items() and second.env.items() >= given.items()


def test_mpirun_binds_as_dtk_run_does_and_stays_on_this_machine(monkeypatch):
    eight = ssh.HostFacts((), tuple(range(8)), "lo")
    monkeypatch.setattr(ssh, "survey", lambda host, ports, **_: eight)
    for workers, parts in {2: [[0, 1, 2, 3], [4, 5, 6, 7]], 9: [[]] * 9}.items():
        (started,) = place("horovod-mpi", ["python"], Places(workers))
        assert json.loads(started.env[CORES]) == parts
    with pytest.raises(ClusterError, match="on this machine only; leave --hosts out"):
        bench_jobs.check_mpirun(HOSTS)


@pytest.fixture
def found(monkeypatch):
    """What ranks of a job find: what is beside this file."""
    path = os.pathsep.join([str(Path(__file__).parent), os.getcwd()])
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.fixture
def make(found):
    """`make(made, busy)`: a job of two ranks that is closed after the test."""
    jobs = []

    def make(made="bench_worker:Worker", busy=False, processes=None):
        processes = processes or place("collective", command(made, Setting()), Places(2))
        places = Places(len(processes))
        jobs.append(BenchJob("played", processes, places, essential=False, busy=busy))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()
        assert job_processes.members(job.job.job_id) == []


def states(job):
    """What the children that measure are doing."""
    members = map(psutil.Process, job_processes.members(job.job.job_id))
    return [one.status() for one in members if one.parent().pid in pids(job.job).values()]


def test_all_ranks_answer_in_their_order_and_whoever_does_not_know_the_key_is_turned_away(make):
    job = make()
    with (
        contextlib.suppress(OSError),
        socket.create_connection(job._door.getsockname()) as line,
    ):
        line.sendall(b"\0\0\0\x05hello")
    job.start()
    assert [versions for _, versions in job.hello] == [{"nothing": "1"}] * 2
    assert job.build("mlp") == (0, ["wait", "die"], {"half": "there is no half"})
    for _ in range(2):
        readings = job.measure("wait")
        assert [reading.sent for reading in readings] == [0, 1]
        assert all(0.01 <= reading.seconds < reading.fit for reading in readings)
    assert psutil.STATUS_STOPPED not in states(job)
    job.close()
    assert {rank.code for rank in job.job._state.tasks} == {0}


def test_a_busy_job_is_stopped_while_nothing_is_asked_and_ends_by_itself_all_the_same(make):
    job = make(busy=True)
    job.start()
    for busy in (True, False, True):
        job._busy = busy
        job.build("mlp")
        assert [one == psutil.STATUS_STOPPED for one in states(job)] == [busy] * 2
    job.measure("wait")
    assert states(job) == [psutil.STATUS_STOPPED] * 2
    job.close()
    assert {rank.code for rank in job.job._state.tasks} == {0}


def test_a_peer_sees_what_is_beside_it_and_not_what_is_beside_dtks_and_the_cores_it_is_given(
    make, tmp_path
):
    """Breaks as PyTorch that imports dtk's report.py, or its plot.py, instead of another's."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "seen.py").write_text(
        "import importlib.util\n"
        "class Worker:\n"
        "    def __init__(self, setting):\n"
        "        names = ('report', 'plot', 'beside')\n"
        "        self.versions = [name for name in names if importlib.util.find_spec(name)]\n"
        "        self.rank = 0\n"
    )
    core = max(os.sched_getaffinity(0))
    # As mpirun would start it.
    env = {CORES: json.dumps([[], [core]]), "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    argv = tuple(command(f"{tmp_path / 'seen.py'}:Worker", Setting()))
    env["OMP_NUM_THREADS"] = "1"
    job = make(processes=[Process("rank 0", "worker", 0, "localhost", argv, env)])
    job.start()
    ((host, seen),) = job.hello
    assert (host["cores"], seen) == ([core], ["beside"])


def test_a_rank_that_fails_in_its_turn_or_cannot_start_is_named_with_its_exception(make):
    job = make()
    job.start()
    job.build("mlp")
    with pytest.raises(JobLost, match="rank 1 ended with exit code 1: RuntimeError: cannot go on"):
        job.measure("die")
    with pytest.raises(JobLost, match="exit code 1: RuntimeError: cannot start"):
        make("bench_worker:Fails").start()


# --- runs ---


@pytest.fixture
def heard_again():
    """Leave signals to whoever had them, as `interruptible` does not: it expects an exit."""
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_interrupt_ends_every_job_and_shows_and_saves_what_was_measured_also_of_what_is_tuned(
    heard_again, found, monkeypatch, tmp_path
):
    """Its jobs need no library. Of the second size nothing is measured: they do not answer."""
    runs, build = [], turns.BenchRun._build

    def interrupted(run, task):
        runs.append(run)
        if task == "allreduce 4000":
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        return build(run, task)

    monkeypatch.setattr(turns, "command", lambda *_: command("bench_worker:Worker", Setting()))
    monkeypatch.setattr(turns.BenchRun, "_build", interrupted)
    monkeypatch.delenv("OF_MINE", raising=False)
    file = tmp_path / "run.json"
    given = ["--communicator", "collective", "--allreduce", "12kB", "--allreduce", "4kB"]
    given += ["--tuned", "OF_MINE=3", "--rounds", "3", "--json", str(file)]
    began = time.monotonic()
    done = CliRunner().invoke(main, ["bench", *given])
    assert done.exit_code == 128 + signal.SIGINT and time.monotonic() - began < 40
    assert "dtk bench: SIGINT: every process was ended" in done.stderr
    assert [job.name for job in runs[0].jobs] == ["collective", "tuned collective"]
    assert [job_processes.members(job.job.job_id) for job in runs[0].jobs] == [[], []]
    assert "all-reduce of 12.0 kB" in done.output and "all-reduce of 4.00 kB" not in done.output
    assert "Not measured: allreduce 4000: ended with exit code 130." in done.output
    assert "tuned: under OF_MINE=3." in done.output
    saved = read(file)
    taken = saved.turns["allreduce 12000"].items()
    sent = {name: [turn[0].sent for turn in of] for name, of in taken}
    assert sent == {"collective mine": [0] * 3, "tuned collective mine": [3] * 3}
    assert saved.setting["tuned"] == ["OF_MINE=3"]


def test_how_long_it_will_take_is_said_once_and_not_of_seconds(capfd, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(turns.time, "monotonic", lambda: now[0])
    for seconds, told in ((60.0, "dtk bench: about 9.0 minutes more\n"), (1.0, "")):
        bar = turns.RunProgress()
        for taken in (0, 1, 2, 3):
            bar.show("mlp", taken, 10)
            now[0] += seconds
        assert capfd.readouterr().err == told
