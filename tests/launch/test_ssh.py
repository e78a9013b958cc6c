"""Other hosts, without a second machine: a remote shell of ours, and network namespaces."""

import dataclasses
import io
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tcp_shell

from dtk.cluster import Host
from dtk.errors import ClusterError
from dtk.launch import assign, job_processes, ssh
from dtk.launch.plan import Process

from support.launched import RING, a_job, ranks, until

pytestmark = pytest.mark.command


def remote(code, count=2):
    return ranks(code, count, "node{}.invalid")


SLEEP = "import time; print('up', flush=True); time.sleep({})"


def survey(shell):
    return lambda host, ports: ssh.survey(host, ports, remote_shell=shell)


def test_ranks_run_over_there_with_their_variables_and_directory(run, shell, monkeypatch):
    monkeypatch.setenv("TF_EXAMPLE", "it's here")
    code = "import os; e = os.environ; print(e['REACHED'], e['R'], e['TF_EXAMPLE'], os.getcwd())"
    given, out, err, _ = run(remote(code), remote_shell=shell)
    assert (given, err) == (0, "")
    assert sorted(out.splitlines()) == [
        f"[{r}] node{r}.invalid {r} it's here {os.getcwd()}" for r in range(2)
    ]


def test_places_that_a_host_has_set_are_not_of_a_rank(run, shell):
    """Each rank trained alone, where a shell over there, or srun, had variables of another job."""
    text = Path(shell).read_text()
    Path(shell).write_text(text.replace("REACHED=", "HOROVOD_RANK=0 REACHED="))
    code = "import os; print(os.environ['REACHED'], os.environ.get('HOROVOD_RANK'))"
    assert run(remote(code, 1), remote_shell=shell)[1] == "[0] node0.invalid None\n"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_rank_is_bound_over_there_to_cores_that_there_are(run, shell, is_there):
    code = "import os; print(*os.sched_getaffinity(0))"
    here = os.sched_getaffinity(0)
    core, bound_to = (max(here), {max(here)}) if is_there else (1 << 12, here)
    bound = [dataclasses.replace(process, cores=(core,)) for process in remote(code, 1)]
    expected = f"[0] {' '.join(map(str, bound_to))}\n"
    assert run(bound, remote_shell=shell)[:3] == (0, expected, "")


def test_a_remote_failure_ends_all_with_its_code_and_words(run, shell):
    code = (
        "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['R'] == '1':\n    raise SystemExit('no more disk')\ntime.sleep(600)"
    )
    given, _, err, seconds = run(remote(code), remote_shell=shell)
    assert given == 1
    assert seconds < 10
    assert "rank 1, host node1.invalid, failed first" in err
    assert err.endswith("no more disk\n")


def test_a_rank_that_is_done_leaves_the_others_on_its_host_alone(run, shell):
    # The mark by which an agent ends its rank was once the whole job's.
    code = "import os, time; time.sleep(float(os.environ['R'])); print('done')"
    given, out, err, _ = run(remote(code), remote_shell=shell)
    assert (given, err, out.count("done")) == (0, "", 2)


def test_a_killed_worker_is_started_again_over_there(run, shell, tmp_path):
    # The agent says 137, which the remote shell passes on.
    (tmp_path / "train.py").write_text(
        "import json, os, pathlib, sys, time\n"
        "role = json.loads(os.environ['TF_CONFIG'])['task']['type']\n"
        "here = pathlib.Path(__file__).parent\n"
        "def until(name):\n"
        "    while not (here / name).exists():\n        time.sleep(0.02)\n"
        "if role == 'worker':\n"
        "    print('up', os.environ['REACHED'])\n"
        "    if not (here / 'lost').exists():\n"
        "        (here / 'lost').touch()\n        os.kill(os.getpid(), 9)\n"
        "    (here / 'served').touch()\n"
        "until('served')\n"
    )
    hosts = [Host("node0.invalid", 1)]
    processes = assign(
        [sys.executable, str(tmp_path / "train.py")],
        hosts=hosts,
        ps=1,
        survey=lambda host, ports: ssh.HostFacts(tuple(range(5000, 5000 + ports)), (0,), ""),
    )
    given, out, err, _ = run(processes, remote_shell=shell)
    lost = "dtk run: rank 1 (worker 0) was killed by SIGKILL; starting it again (1 of 3)\n"
    assert (given, err) == (0, lost)
    assert out == "[   1] up node0.invalid\n" * 2


def test_a_lost_connection_ends_the_rank_over_there(shell):
    out, processes = io.StringIO(), remote(SLEEP.format(600), 1)
    with a_job(processes, remote_shell=shell, grace=5.0, stdout=out, stderr=out) as job:
        until(lambda: "up" in out.getvalue())
        assert len(job_processes.members(job.job_id)) == 1
        pipe = next(iter(job._state.tasks)).popen.stdin
        pipe.close()
        assert job.wait(timeout=10) == 143
    assert job_processes.members(job.job_id) == []


def test_an_interpreter_missing_over_there_is_named_with_its_host(shell):
    with pytest.raises(ClusterError) as error:
        ssh.survey("node0.invalid", 1, remote_shell=shell, python="/nowhere/bin/python")
    assert str(error.value).startswith("host node0.invalid cannot run /nowhere/bin/python (")
    assert "at the same path on every host" in str(error.value)


def test_a_remote_shell_that_cannot_be_read():
    with pytest.raises(ClusterError, match="cannot be read: No closing quotation.*BatchMode"):
        ssh.survey("a", 1, remote_shell="ssh -o 'User")


def test_a_program_missing_over_there_is_named(run, shell):
    process = Process("rank 0", "worker", 0, "node0.invalid", ("no-such-program",), {})
    given, _, err, _ = run([process], remote_shell=shell)
    assert given == 127
    assert "cannot start no-such-program" in err


def test_a_name_that_only_ssh_knows_is_no_host_that_cannot_be_reached(shell):
    """The command to try worked."""
    said = "host node.invalid can be reached, but node.invalid is no address of its own there"
    with pytest.raises(ClusterError, match=said):
        ssh.survey("node.invalid", 1, remote_shell=shell)


@pytest.mark.parametrize(
    "answer", ["echo 'Permission denied (publickey).' >&2; exit 255", "exit 0"]
)
def test_a_host_that_cannot_be_reached_is_named_with_the_command_to_try(tmp_path, answer):
    script = tmp_path / "shell"
    script.write_text(f"#!/bin/sh\n{answer}\n")
    script.chmod(0o755)
    with pytest.raises(ClusterError) as error:
        ssh.survey("node0.invalid", 1, remote_shell=str(script))
    assert str(error.value).startswith("host node0.invalid cannot be reached: ")
    assert f"{script} node0.invalid" in str(error.value)
    with pytest.raises(ClusterError, match="cannot be reached"):
        ssh.survey("node0.invalid", 1, remote_shell="no-such-shell")


def test_ranks_on_two_hosts_reach_each_other(run, two_hosts):
    hosts, shell = two_hosts

    processes = assign([sys.executable, "-c", RING], hosts=hosts, survey=survey(shell))
    given, out, err, _ = run(processes, remote_shell=shell)
    assert (given, err) == (0, "")
    a, b = hosts[0].name, hosts[1].name
    assert sorted(out.splitlines()) == [
        f"[0] heard 2 on {a}",
        f"[1] heard 0 on {a}",
        f"[2] heard 1 on {b}",
    ]


@pytest.mark.full("ranks that are lost end a job as in other tests of this folder")
@pytest.mark.timeout(120)
def test_horovod_reduces_between_two_hosts(run, two_hosts):
    pytest.importorskip("horovod", reason="Horovod is not installed: run `dtk install-horovod`")
    hosts, shell = two_hosts
    code = (
        "import horovod.tensorflow as hvd, tensorflow as tf\nhvd.init()\n"
        "print(hvd.local_size(), float(hvd.allreduce(tf.constant(hvd.rank() + 1.0), op=hvd.Sum)))"
    )
    hosts = [Host(hosts[0].name, 1), Host(hosts[1].name, 1)]

    processes = assign(
        [sys.executable, "-c", code], hosts=hosts, communicator="horovod", survey=survey(shell)
    )
    assert {p.env["HOROVOD_GLOO_IFACE"] for p in processes} == {"eth0"}
    given, out, err, _ = run(processes, remote_shell=shell)
    assert given == 0, err
    assert sorted(out.splitlines()) == ["[0] 1 3.0", "[1] 1 3.0"]


@pytest.mark.full("ranks that are lost end a job as in other tests of this folder")
@pytest.mark.timeout(180)
def test_parameter_servers_on_two_hosts(run, two_hosts):
    """A server and a worker on each: weights and gradients cross the network."""
    hosts, shell = two_hosts
    script = Path(__file__).resolve().parents[2] / "examples" / "digits_parameter_server.py"

    processes = assign(
        [sys.executable, str(script), "--epochs=2"],
        hosts=[Host(hosts[0].name, 1), Host(hosts[1].name, 1)],
        ps=2,
        survey=survey(shell),
    )
    roles = {process.name: process.host for process in processes}
    assert {roles["ps 0"], roles["ps 1"]} == {host.name for host in hosts}
    given, out, err, _ = run(processes, remote_shell=shell, grace=10.0, wait=150)
    assert given == 0, err
    assert "after 46 steps" in out
    assert "worker 0: 0 steps" not in out and "worker 1: 0 steps" not in out


# A launcher of which nothing is heard any more.


@pytest.mark.full("ranks that are lost end a job as in other tests of this folder")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("beats", [True, False])
def test_a_rank_ends_when_its_launcher_is_silent_and_not_before(run, shell, monkeypatch, beats):
    monkeypatch.setattr(ssh, "SILENCE", 3.0)
    monkeypatch.setattr(ssh, "HEARTBEAT", 0.2 if beats else 600.0)
    code, _, err, _ = run(remote(SLEEP.format(6 if beats else 600), 1), remote_shell=shell)
    silent = "dtk: the launcher said nothing for 3 s; what it started is ended"
    assert (code, silent in err) == ((0, False) if beats else (143, True))


LAUNCHER = f"""
import sys
from dtk.launch import Job, JobSpec, Process, ssh
ssh.SILENCE, ssh.HEARTBEAT = 15.0, 1.0
command = (sys.executable, "-c", {SLEEP.format(600)!r})
processes = (Process("rank 0", "worker", 0, sys.argv[1], command, {{}}),)
with Job(JobSpec(processes=processes, remote_shell=sys.argv[2], grace=1.0)) as job:
    print(job.job_id, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.full("ranks that are lost end a job as in other tests of this folder")
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
