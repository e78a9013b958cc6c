"""Ranks that dtk starts, and MPI's servers that it is for them: real ranks, real MPI."""

import contextlib
import dataclasses
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest

from dtk.cluster import Host, mpi_installs, mpi_join, mpi_server, pmix
from dtk.cluster.stall import STUCK
from dtk.cluster.variables import COMMUNICATOR
from dtk.errors import CommunicatorError
from dtk.launch import assign, job_processes, mpi_servers, ssh, supervisor

from support.launched import a_job, pids, until

pytestmark = pytest.mark.command

needs_mpi = pytest.mark.skipif(
    mpi_installs.mpirun() is None, reason="no MPI beside python: pip install './dtk[mpi]'"
)
SUM = (
    "import os\nfrom mpi4py import MPI\nworld = MPI.COMM_WORLD\n"
    "print(world.rank, world.size, world.allreduce(world.rank + 1), os.environ['DTK_COMMUNICATOR'])"
)


def servers_of(launcher=None):
    """Return MPI's servers that a launcher has started here: its ranks listen nowhere."""
    return [
        child
        for child in psutil.Process(launcher).children()
        if any(one.status == psutil.CONN_LISTEN for one in child.net_connections())
    ]


def make(code, workers=2, communicator="auto", **options):
    return assign([sys.executable, "-c", code], workers, communicator=communicator, **options)


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Where MPI and dtk put files meanwhile; nothing may be left there."""
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(mpi_server, "SHARED_MEMORY", str(shared))
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


@needs_mpi
def test_mpis_server_that_is_killed_is_named_and_no_rank(places, monkeypatch):
    """Each rank said that it had failed by itself, with exit code 195."""
    monkeypatch.setattr(supervisor, "LATE", 1.0)  # a rank that fails of it does so at once
    code = "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\nimport time; time.sleep(600)"
    out, err = io.StringIO(), io.StringIO()
    number = signal.SIGRTMIN + 6
    with a_job(make(code, communicator="mpi"), stdout=out, stderr=err, grace=0.5) as job:
        time.sleep(1.0)  # MPI has started by then, or not: the server is gone either way
        (victim,) = servers_of()
        victim.send_signal(number)
        assert job.wait(60) == 128 + number
    last = err.getvalue().splitlines()[-1]
    named = f"dtk: MPI's server on localhost (process {victim.pid}) was ended by signal 40"
    assert last == f"{named}; every rank needs it. The job was ended.", err.getvalue()
    assert "failed first" not in err.getvalue()


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
def test_where_mpi_does_not_start_auto_goes_on_and_says_why(run, places, tmp_path, monkeypatch):
    library = tmp_path / "prefix" / pmix.LIBRARIES[0]
    library.parent.mkdir(parents=True)
    library.write_text("of another MPI")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    code, out, err, _ = run(make("import os; print(os.environ['DTK_COMMUNICATOR'])"))
    assert code == 0
    assert sorted(out.splitlines()) == ["[0] auto", "[1] auto"]
    (line,) = err.splitlines()
    assert line.startswith("dtk run: going on over TensorFlow's collectives: communicator mpi: ")
    why = f"MPI's server did not start: {library}: "
    assert why in line
    with pytest.raises(CommunicatorError, match=re.escape(why)):
        run(make("", communicator="mpi"))
    shutil.rmtree(tmp_path / "prefix")


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
        rank = psutil.Process(pids(job)["rank 0"])
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


@needs_mpi
def test_mpis_server_ends_with_the_last_rank_of_a_launcher_that_is_killed(tmp_path):
    code = (
        "import sys, time\nfrom dtk.cluster import mpi_server\n"
        "from dtk.launch import Job, JobSpec, assign\n"
        f"mpi_server.SHARED_MEMORY = {str(tmp_path)!r}\n"
        f"ranks = assign([sys.executable, '-c', {SUM + '; import time; time.sleep(600)'!r}], 2, "
        "communicator='mpi')\n"
        "job = Job(JobSpec(processes=tuple(ranks), grace=0.5)).start()\n"
        "print('job', job.job_id, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as launcher:
        lines = (line.decode().split() for line in launcher.stdout)
        job = next(line[1] for line in lines if line[0] == "job")
        (server,) = servers_of(launcher.pid)
        assert len(list(tmp_path.iterdir())) == 1
        ranks = [psutil.Process(pid) for pid in job_processes.members(job)]
        launcher.kill()
    gone, still = psutil.wait_procs([server, *ranks], 20)
    assert not still
    assert list(tmp_path.iterdir()) == []


@needs_mpi
def test_what_a_killed_server_left_is_removed_by_the_next_one(places, tmp_path, monkeypatch):
    order = {"namespace": "of-one", "machines": [[0]], "hosts": ["a"], "here": 0, "meeting": ""}
    mpi_join._serve({**order, "ports": [], "pids": [os.getpid()]})
    (folder,) = (tmp_path / "shm").iterdir()
    server = mpi_join._kept.pop()
    os.kill(server.pid, signal.SIGKILL)
    assert folder.exists()
    try:
        mpi_join._serve({**order, "namespace": "of-two", "ports": [], "pids": [os.getpid()]})
        assert not folder.exists()
    finally:
        mpi_join.end_server()
        server.close()


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


def test_a_server_that_does_not_answer_is_ended_with_all_that_it_has_started(monkeypatch):
    """It hung: what was ended was the shell around it, and not what holds its output open."""
    monkeypatch.setattr(mpi_server, "START_SECONDS", 0.3)
    server = mpi_server.MPIServer(["sh", "-c", "sleep 1000 & wait"], "")
    until(lambda: psutil.Process(server.pid).children())
    children = psutil.Process(server.pid).children()
    with pytest.raises(CommunicatorError, match=r"it did not answer within 0.3 s"):
        server.answer()
    server.close()
    psutil.wait_procs(children, 10)
    assert not any(one.is_running() for one in children)


@needs_mpi
def test_a_job_in_a_job_and_what_a_host_says_of_itself(run, places, tmp_path, monkeypatch):
    """Its name went into names of files; the greeting of a shell was read as an answer."""
    outer = {"DTK_JOB": "outer/rank-0", "DTK_MPI_SERVER": "a", "OMPI_MCA_btl": "self"}
    with monkeypatch.context() as around:
        for name, value in outer.items():
            around.setenv(name, value)
        assert sorted(run(make(SUM))[1].splitlines()) == [f"[{r}] {r} 2 3 mpi" for r in range(2)]
    say = 'echo Welcome; echo {}; echo 7; printf Hello; exec "$@"'
    greets = ["sh", "-c", say, "sh", sys.executable, "-c"]
    monkeypatch.setattr(ssh, "remote_command", lambda host, shell: [*greets, ssh.BOOTSTRAP])
    processes = make("", communicator="mpi")
    monkeypatch.setattr(ssh, "is_local", lambda host: False)
    servers = mpi_servers.MPIServers()
    servers.start(processes, "job", "ssh")
    servers.close()
    assert [env["PMIX_RANK"] for env in servers.env] == ["0", "1"]


@needs_mpi
def test_a_server_that_has_lost_another_ends_and_says_which_machine(places, tmp_path):
    """Its ranks waited for ever, or went on as if all had come."""
    order = {
        "prefix": sys.prefix,
        "memory": mpi_server.SHARED_MEMORY,
        "namespace": "dtk-lost",
        "machines": [[0], [1]],
        "hosts": ["a", "b"],
        "meeting": "127.0.0.1",
        "ports": mpi_server.some_ports(),
        "secret": "s",
        "pids": [os.getpid()],
    }
    quick = "from dtk.cluster import pmix; pmix._FAREWELL = 1.0; raise SystemExit(pmix.main())"
    servers, variables = [], {}
    with contextlib.ExitStack() as stack:
        for here in (0, 1):
            line = json.dumps({**order, "here": here}) + "\n"
            servers.append(mpi_server.MPIServer([sys.executable, "-c", quick], line))
            stack.callback(servers[-1].close)
            stack.callback(servers[-1].kill)
            served = servers[-1].answer()
            order["ports"] = served.ports
            variables |= served.variables
        code = "from mpi4py import MPI"
        env = {**os.environ, **variables[0], "OMPI_MCA_mpi_ft_enable": "false"}
        rank = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE)
        time.sleep(1.0)
        servers[1].kill()
        rank.communicate(timeout=30)
        assert rank.returncode != 0
        until(lambda: servers[0].code is not None)
        assert servers[0].said().endswith("wait for machine 1 (b), whose server is gone")
