"""Ranks are told where they are, and where the others."""

import pytest

from dtk.cli import bench_places
from dtk.cluster import Host
from dtk.errors import ClusterError
from dtk.launch import ssh

FACTS = {
    "node1": ssh.Facts((4001,), (0, 1), "eth0"),
    "node2": ssh.Facts((4002, 4003), (0, 1), "ib0"),
    "node3": ssh.Facts((4004,), (0, 1), ""),
}
HOSTS = [Host("node1", 1), Host("node2", 2), Host("node3", 1)]


def place(launcher):
    return bench_places.place(launcher, ["python"], 4, HOSTS, lambda host, ports: FACTS[host])


def test_pytorch_meets_at_rank_0_by_the_interface_of_each_host():
    for rank, process in enumerate(place("collective")):
        given = process.env
        assert (given["RANK"], given["WORLD_SIZE"]) == (str(rank), "4")
        assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("node1", "4001")
        assert given.get("GLOO_SOCKET_IFNAME", "") == FACTS[process.host].interface


def test_on_this_machine_it_stays_on_loopback():
    first, second = bench_places.place("collective", ["python"], 2, (), ssh.survey)
    port = first.address.rpartition(":")[2]
    for process in (first, second):
        assert process.env["MASTER_ADDR"] == "127.0.0.1"
        assert process.env["MASTER_PORT"] == port
        assert process.env["GLOO_SOCKET_IFNAME"] == "lo"


def test_mpirun_binds_as_dtk_run_does():
    def survey(host, ports):
        return ssh.Facts((), tuple(range(8)), "lo")

    (started,) = bench_places.place("horovod-mpi", ["python"], 2, (), survey)
    assert started.argv[2:6] == ("--map-by", "slot:PE=4", "--bind-to", "core")
    (started,) = bench_places.place("horovod-mpi", ["python"], 9, (), survey)
    assert started.argv[2:4] == ("--bind-to", "none")


def test_horovod_meets_elsewhere():
    assert all("MASTER_PORT" not in process.env for process in place("horovod"))


def test_what_mpirun_starts_stays_on_this_machine():
    with pytest.raises(ClusterError, match="on this machine only; leave --hosts out"):
        bench_places.check_mpirun(HOSTS)
