"""Ranks that dtk starts, in the places that MPI's own launcher made: real ranks, real MPI."""

import dataclasses
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from dtk.cluster import Host, mpi_installs, mpi_server
from dtk.cluster.stall import STUCK
from dtk.cluster.variables import COMMUNICATOR
from dtk.errors import CommunicatorError
from dtk.launch import assign, job_processes, mpi_places, ssh, watch

from support.launched import a_job, until

pytestmark = pytest.mark.command

needs_mpi = pytest.mark.skipif(
    mpi_installs.mpirun() is None, reason="no MPI beside python: pip install './dtk[mpi]'"
)
SUM = (
    "import os\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
    "print(world.rank, world.size, world.allreduce(world.rank + 1), os.environ['DTK_COMMUNICATOR'])"
)
# What keeps PRRTE from starting: it wants another interface than loopback.
NOT_STARTING = "PRTE_MCA_oob_tcp_if_include"


def make(code, workers=2, communicator="auto", **options):
    return assign([sys.executable, "-c", code], workers, communicator=communicator, **options)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Where MPI and dtk put files meanwhile; nothing may be left there."""
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(mpi_server, "SHARED_MEMORY", shared)
    yield
    assert [path for path in tmp_path.rglob("*") if path != shared] == []


@pytest.mark.parametrize(
    ("exported", "options", "taken"),
    [
        (None, {}, "auto"),
        ("collective", {}, "collective"),
        ("horovod", {}, "horovod"),
        ("mpi", {"communicator": "collective"}, "collective"),
        # servers and one rank alone are not joined by MPI
        ("mpi", {"ps": 1}, "collective"),
        (None, {"workers": 1}, "collective"),
    ],
)
def test_what_the_user_exported_decides_auto(exported, options, taken):
    environ = {COMMUNICATOR: exported} if exported else {}
    made = make("", environ=environ, **options)
    assert {process.env[COMMUNICATOR] for process in made} == {taken}


@needs_mpi
def test_ranks_meet_in_mpis_world_and_nothing_is_left(run, places):
    code, out, err, _ = run(make(SUM, 3))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[{r}] {r} 3 6 mpi" for r in range(3)]


@needs_mpi
def test_what_an_earlier_server_left_does_not_keep_mpi_from_starting(places, tmp_path):
    """The folder of a server that was killed, when its number was given to the next one."""
    host, last = socket.gethostname(), int(Path("/proc/loadavg").read_text().split()[-1])
    left = [tmp_path / f"ompi.{pid}" for pid in range(last, last + 2000)]
    for folder in left:
        folder.mkdir()
        (folder / f"pmix.{host}.tool").touch()
    try:
        made = mpi_places.MPIPlaces(["localhost"], "earlier", "ssh")
        made.close()
    finally:
        for folder in left:
            shutil.rmtree(folder, ignore_errors=True)
    assert Path(made.env[0]["PMIX_SERVER_TMPDIR"]).parent in made.folders


@needs_mpi
def test_on_one_machine_ranks_listen_nowhere(run):
    listening = (
        "import os, psutil\nfrom mpi4py import MPI\nMPI.COMM_WORLD.allreduce(1)\n"
        "print([c.laddr.port for c in psutil.Process().net_connections() if c.status == 'LISTEN'])"
    )
    code, out, err, _ = run(make(listening))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] []", "[1] []"]


@needs_mpi
def test_a_rank_that_is_killed_is_named_and_nothing_is_left(run, places):
    code, _, err, seconds = run(
        make(
            "import os, time\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\nworld.Barrier()\n"
            "if world.rank == 1: os.kill(os.getpid(), 9)\nworld.Barrier()\ntime.sleep(600)"
        )
    )
    assert code == 137
    assert "rank 1, host localhost, failed first, by SIGKILL" in err
    assert seconds < 20


@pytest.mark.full_but("prterun-40-signal 40")
@needs_mpi
@pytest.mark.parametrize(
    ("which", "number", "how"),
    [("prterun", signal.SIGRTMIN + 6, "signal 40"), ("cat", signal.SIGKILL, "SIGKILL")],
)
def test_mpis_server_that_is_killed_is_named_and_no_rank(which, number, how, places, monkeypatch):
    """Each rank said that it had failed by itself, with exit code 195."""
    monkeypatch.setattr(watch, "LATE", 1.0)  # a rank that fails of it does so at once
    code = "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\nimport time; time.sleep(600)"
    out, err = io.StringIO(), io.StringIO()
    with a_job(make(code, communicator="mpi"), stdout=out, stderr=err, grace=0.5) as job:
        time.sleep(1.0)  # MPI has started by then, or not: the server is gone either way
        beside = map(psutil.Process, job_processes.members(job.job_id + job_processes.BESIDE))
        victim = next(one for one in beside if one.name() == which)
        victim.send_signal(number)
        assert job.wait(60) == 128 + number
    last = err.getvalue().splitlines()[-1]
    named = (
        f"dtk: MPI's server (prterun, process {victim.pid})"
        if which == "prterun"
        else f"dtk: process {victim.pid}, which MPI's server keeps in the place of rank "
    )
    assert last.startswith(named) and f" was ended by {how}" in last, err.getvalue()
    assert "failed first" not in err.getvalue()
    assert last.endswith("every rank needs it. The job was ended.")


def test_a_host_that_the_network_cuts_off_is_named_with_its_rank(tmp_path):
    """What the server wrote when its connections were reset, and ended with 0; no rank was named.

    `tools/link_faults.py reset --communicator mpi` resets them.
    """
    errors = tmp_path / "errors"
    errors.write_text(
        "----\nPRTE has lost communication with a remote daemon.\n\n"
        "  HNP daemon   : [prterun-dtkd467a91-13@0,0] on node dtkd467a91\n"
        "  Remote daemon: [prterun-dtkd467a91-13@0,2] on node dtkd467a93\n\n"
        "This is usually due to either a failure of the TCP network connection to the node\n"
    )
    places = object.__new__(mpi_places.MPIPlaces)
    places._hosts = ["127.0.0.1", "10.9.9.2", "10.9.9.2", "10.9.9.3"]
    places._process = subprocess.Popen(["true"])
    places._process.wait()
    with errors.open() as places._errors:
        how, code = places.lost()
    assert how.startswith("rank 3, host 10.9.9.3, is cut off: MPI's server (prterun, process")
    assert how.endswith("(node dtkd467a93)") and code == 1


@needs_mpi
def test_ranks_that_are_asked_to_end_can_still_make_groups(tmp_path):
    # As in saving a checkpoint together: MPI's server must not be ended with them.
    code = (
        "import signal, sys, time\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
        "def end(*_):\n    time.sleep(1)\n"
        "    print(world.Split(0, -world.rank).Dup().allreduce(1), flush=True)\n"
        "    sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('ready', flush=True)\nfor _ in range(600):\n"
        "    time.sleep(0.1)"
    )
    job = a_job(make(code), output_dir=tmp_path, stdout=io.StringIO(), grace=10.0).start()
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    until(lambda: all(log.read_text() for log in logs))
    job.stop()
    assert [log.read_text().splitlines() for log in logs] == [["ready", "2"]] * 2


@needs_mpi
def test_where_mpi_does_not_start_auto_goes_on_and_says_why(run, places, monkeypatch):
    monkeypatch.setenv(NOT_STARTING, "lo")
    code, out, err, _ = run(make("import os; print(os.environ['DTK_COMMUNICATOR'])"))
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] auto", "[1] auto"]
    (line,) = err.splitlines()
    assert line.startswith("dtk run: going on over TensorFlow's collectives: communicator mpi: ")
    # On a busy machine mpirun may end before it has written why.
    why = "before the ranks could start: (No network interfaces were found|it said nothing)"
    assert re.search(why, line)
    with pytest.raises(CommunicatorError, match=why):
        run(make("", communicator="mpi"))


@needs_mpi
def test_a_small_shared_memory_is_told_with_what_helps(run, places, monkeypatch):
    """Open MPI ends a rank for it with exit code 14, and says nothing."""
    monkeypatch.setattr(mpi_installs, "_SEGMENT", 1 << 60)
    why = r" has \d+ MB free, and MPI needs \d+ MB there for 2 rank\(s\); give it more"
    code, _, err, _ = run(make("import os"))
    assert code == 0
    assert re.search(f"dtk run: going on over TensorFlow's collectives: .*{why}", err)
    with pytest.raises(CommunicatorError, match=why):
        run(make("", communicator="mpi"))


JOINS = (
    "import os, sys, time\nfrom dtk.cluster import progress\nprogress.start()\n"
    "while not os.path.exists(sys.argv[1]): time.sleep(0.05)\n"
    "with progress.joining('the start of mpi'):\n    from mpi4py import MPI\n"
    "print(MPI.COMM_WORLD.size)"
)


@needs_mpi
@pytest.mark.timeout(120)
def test_who_keeps_mpi_from_starting_by_a_silent_connection_is_named(tmp_path):
    """Also where MPI starts at once: an older report came last, and a rank was blamed."""
    out, err = io.StringIO(), io.StringIO()
    connected = tmp_path / "connected"
    processes = [
        dataclasses.replace(
            one,
            argv=(*one.argv, str(connected)),
            env={**one.env, "DTK_STALL_TIMEOUT": "5", "DTK_RUN": "1"},
        )
        for one in make(JOINS, communicator="mpi")
    ]
    job = a_job(processes, stdout=out, stderr=err, grace=0.5, stall_timeout=5.0)
    with job.start():
        rank = psutil.Process(job.pids["rank 0"])
        port = rank.environ()["PMIX_SERVER_URI41"].rpartition(":")[2]
        code = (
            f"import socket, time\nend = socket.create_connection(('127.0.0.1', {port}))\n"
            f"open({str(connected)!r}, 'w').close()\ntime.sleep(99)"
        )
        with subprocess.Popen([sys.executable, "-c", code]) as stranger:
            try:
                assert job.wait(60) == STUCK
            finally:
                stranger.kill()
    line = err.getvalue().splitlines()[1]
    assert f"MPI's server does not answer: process {stranger.pid} (python" in line
    assert "start with `dtk run --isolate`" in line


@pytest.mark.full_but("alone")
@needs_mpi
@pytest.mark.parametrize("guard_too", [False, True], ids=["alone", "with its guard"])
def test_a_launcher_that_is_killed_takes_mpis_server_and_memory_with_it(
    guard_too, tmp_path, monkeypatch
):
    monkeypatch.setattr(mpi_server, "SHARED_MEMORY", tmp_path)
    code = (
        "import pathlib, sys, time\nfrom dtk.cluster import mpi_server\n"
        "from dtk.launch import Job, JobSpec, assign\n"
        f"mpi_server.SHARED_MEMORY = pathlib.Path({str(tmp_path)!r})\n"
        f"ranks = assign([sys.executable, '-c', {SUM + '; import time; time.sleep(600)'!r}], 2, "
        "communicator='mpi')\n"
        "job = Job(JobSpec(processes=tuple(ranks), grace=0.5)).start()\n"
        "print('job', job.job_id, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        lines = (line.decode().split() for line in launcher.stdout)
        job = next(line[1] for line in lines if line[0] == "job")
        assert job_processes.members(job + job_processes.BESIDE)
        own = set(tmp_path.iterdir())
        assert len(own) == 1
        beside = job_processes.members(job + job_processes.BESIDE)
        there = [psutil.Process(pid) for pid in (*job_processes.members(job), *beside)]
        for child in psutil.Process(launcher.pid).children() if guard_too else ():
            if child not in there:
                child.kill()
        os.kill(launcher.pid, signal.SIGKILL)
    if guard_too:
        psutil.wait_procs(there, 10)
        assert own & set(tmp_path.iterdir())
        with a_job(make(SUM, communicator="mpi"), stdout=io.StringIO()) as job_after:
            assert job_after.wait(60) == 0  # which tidies up
    # The guard removes what lies in memory when all processes have ended.
    until(lambda: not own & set(tmp_path.iterdir()), 10)
    left = [job_processes.members(one) for one in (job, job + job_processes.BESIDE)]
    assert left == [[], []]


@needs_mpi
@pytest.mark.timeout(120)
def test_mpi_between_two_hosts(two_hosts):
    hosts, shell = two_hosts

    def survey(host, ports):
        return ssh.survey(host, ports, remote_shell=shell)

    where = [Host(hosts[1].name, 1), Host(hosts[0].name, 2)]
    processes = make(SUM, None, "mpi", hosts=where, survey=survey)
    assert {process.env["OMPI_MCA_btl_tcp_if_include"] for process in processes} == {"eth0"}
    out, err = io.StringIO(), io.StringIO()
    with a_job(processes, stdout=out, stderr=err, remote_shell=shell) as job:
        assert job.wait(timeout=60) == 0, err.getvalue()
    assert sorted(out.getvalue().splitlines()) == [f"[{r}] {r} 3 6 mpi" for r in range(3)]
    # The namespaces' shell hands on its variables, by which MPI's servers there are found.
    assert job_processes.members(job.job_id + job_processes.BESIDE) == []


def test_a_server_that_does_not_answer_is_ended_with_all_that_it_has_started(places, monkeypatch):
    """It hung: what was ended was the shell around it, and not what holds its output open."""
    silent = Path(tempfile.gettempdir(), "mpirun")
    silent.write_text("#!/bin/sh\nsleep 1000 & wait\n")
    silent.chmod(0o700)
    monkeypatch.setattr(mpi_server, "START_SECONDS", 0.3)
    monkeypatch.setattr(mpi_installs, "required_mpirun", lambda: silent)
    began = time.monotonic()
    with pytest.raises(CommunicatorError, match=r"mpirun did not answer within 0.3 s"):
        mpi_server.MPIServer(2)
    assert time.monotonic() - began < 20
    silent.unlink()
