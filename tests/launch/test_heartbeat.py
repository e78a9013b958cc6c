"""A rank on another host ends when nothing is heard of the launcher, and does not before."""

import io
import shlex
import subprocess
import sys
import time

import pytest
import tcp_shell

from dtk.launch import Job, job_processes, machines
from dtk.launch.plan import Process

SLEEP = "import time; print('up', flush=True); time.sleep({})"


@pytest.fixture
def shell(tmp_path):
    """A remote shell that reaches this machine by any name."""
    script = tmp_path / "shell"
    script.write_text('#!/bin/sh\nshift; exec sh -c "$*"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("beats", [True, False])
def test_a_rank_ends_when_its_launcher_is_silent(shell, monkeypatch, beats):
    monkeypatch.setattr(machines, "SILENCE", 4.0)
    monkeypatch.setattr(machines, "HEARTBEAT", 0.2 if beats else 600.0)
    command = (sys.executable, "-c", SLEEP.format(8 if beats else 600))
    processes = [Process("rank 0", "worker", 0, "node0.invalid", command, {})]
    err = io.StringIO()
    with Job(processes, remote_shell=shell, grace=1.0, stdout=io.StringIO(), stderr=err) as job:
        code = job.wait(timeout=60)
    silent = "dtk: the launcher said nothing for 4 s; the rank is ended"
    assert (code, silent in err.getvalue()) == ((0, False) if beats else (143, True))
    assert job_processes.members(job.job_id) == []


LAUNCHER = f"""
import sys
from dtk.launch import Job, machines
from dtk.launch.plan import Process
machines.SILENCE, machines.HEARTBEAT = 15.0, 1.0
command = (sys.executable, "-c", {SLEEP.format(600)!r})
processes = [Process("rank 0", "worker", 0, sys.argv[1], command, {{}})]
with Job(processes, remote_shell=sys.argv[2], grace=1.0) as job:
    print(job.job_id, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.timeout(180)
def test_a_rank_behind_a_cut_cable_ends(two_hosts):
    # The connection that is cut never ends: sshd would keep it, and the rank, for hours.
    (near, far), shell = two_hosts
    name = subprocess.check_output([shell, far.name, "hostname"], text=True).strip()
    cable = f"{name[:-1]}v{name[-1]}"
    with tcp_shell.served(shell, near.name), tcp_shell.served(shell, far.name) as remote:
        command = shlex.join([sys.executable, "-c", LAUNCHER, far.name, remote])
        with subprocess.Popen(
            [remote, near.name, command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as launcher:
            told = [launcher.stdout.readline().strip() for _ in range(2)]
            assert "[0] up" in told
            job = next(line for line in told if line != "[0] up")
            subprocess.run(["ip", "link", "set", cable, "down"], check=True)
            cut = time.monotonic()
            launcher.communicate("\n", timeout=60)
        assert job_processes.members(job), "what the launcher has left on the other host still runs"
        while job_processes.members(job):
            assert time.monotonic() < cut + 60.0
            time.sleep(0.05)


SILENCE = """
import dtk
from tensorflow.python.eager import context
dtk.strategies.AllReduceStrategy("collective")
print(context.context().coordination_service.heartbeat_timeout_in_ms)
"""


@pytest.mark.timeout(120)
def test_collectives_outlive_a_short_outage_under_dtk_run(tmp_path):
    """Of 5 and 10 seconds, which `tools/link_faults.py` makes."""
    (tmp_path / "train.py").write_text(SILENCE)
    command = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--communicator"]
    done = subprocess.run(
        [*command, "collective", str(tmp_path / "train.py")], capture_output=True, text=True
    )
    assert sorted(done.stdout.splitlines()) == ["[0] 40000", "[1] 40000"], done.stderr
