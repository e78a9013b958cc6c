"""Ranks are told where they are, and where the others."""

import json
import os
import subprocess
import sys
from multiprocessing.connection import Listener

import pytest

from dtk.bench import agent, places
from dtk.bench.agent import CORES
from dtk.cluster import Host
from dtk.errors import ClusterError
from dtk.launch import machines

FACTS = {
    "node1": machines.HostFacts((4001,), (0, 1), "eth0"),
    "node2": machines.HostFacts((4002, 4003), (0, 1), "ib0"),
    "node3": machines.HostFacts((4004,), (0, 1), ""),
}
HOSTS = [Host("node1", 1), Host("node2", 2), Host("node3", 1)]


def place(launcher):
    return places.place(launcher, ["python"], 4, HOSTS, lambda host, ports: FACTS[host])


def test_pytorch_meets_at_rank_0_by_the_interface_of_each_host():
    for rank, process in enumerate(place("collective")):
        given = process.env
        assert (given["RANK"], given["WORLD_SIZE"]) == (str(rank), "4")
        assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("node1", "4001")
        assert given.get("GLOO_SOCKET_IFNAME", "") == FACTS[process.host].interface


def test_on_this_machine_it_stays_on_loopback():
    first, second = places.place("collective", ["python"], 2, (), machines.survey)
    port = first.address.rpartition(":")[2]
    for process in (first, second):
        assert process.env["MASTER_ADDR"] == "127.0.0.1"
        assert process.env["MASTER_PORT"] == port
        assert process.env["GLOO_SOCKET_IFNAME"] == "lo"


def test_mpirun_binds_as_dtk_run_does():
    def survey(host, ports):
        return machines.HostFacts((), tuple(range(8)), "lo")

    for workers, parts in {2: [[0, 1, 2, 3], [4, 5, 6, 7]], 9: [[]] * 9}.items():
        (started,) = places.place("horovod-mpi", ["python"], workers, (), survey)
        assert json.loads(started.env[CORES]) == parts


def test_an_agent_under_mpirun_takes_its_part(tmp_path):
    core = max(os.sched_getaffinity(0))
    (tmp_path / "client.py").write_text(
        "import os, sys\n"
        "print('null', flush=True)\n"
        "sys.stdin.readline()\n"
        f"sys.exit(11 if os.sched_getaffinity(0) == {{{core}}} else 1)"
    )
    with Listener(("127.0.0.1", 0), authkey=b"key") as listener:
        port = listener.address[1]
        given = {agent.ADDRESS: f"127.0.0.1:{port}", agent.KEY: b"key".hex()}
        given |= {CORES: json.dumps([[], [core]]), "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
        command = [sys.executable, "-m", "dtk.bench.agent", sys.executable]
        started = subprocess.Popen([*command, str(tmp_path / "client.py")], env=os.environ | given)
        with listener.accept() as line:
            assert line.recv() is None
            line.send(None)
            assert started.wait(timeout=30) == 11


def test_horovod_meets_elsewhere():
    assert all("MASTER_PORT" not in process.env for process in place("horovod"))


def test_what_mpirun_starts_stays_on_this_machine():
    with pytest.raises(ClusterError, match="on this machine only; leave --hosts out"):
        places.check_mpirun(HOSTS)
