"""A plan is pure: these tests start nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtk.cluster import Host, detect
from dtk.errors import ClusterError
from dtk.launch import assign
from dtk.launch.ssh import HostFacts

pytestmark = pytest.mark.command

COMMAND = ["python", "train.py"]


def facts(host, ports):
    return HostFacts(
        tuple(range(5000, 5000 + ports)),
        cores=tuple(range(8)),
        interface="lo" if host == "localhost" else "eth0",
    )


def make(workers=None, hosts=(), **options):
    options = {"environ": {}, "survey": facts, **options}
    return assign(COMMAND, workers, hosts=hosts, **options)


hosts = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda slots: [Host(f"node{i}", n) for i, n in enumerate(slots)]
)


@given(hosts, st.data(), st.sampled_from(["collective", "horovod"]))
def test_every_rank_detects_the_place_it_was_planned_for(given_hosts, data, communicator):
    slots = sum(host.slots for host in given_hosts)
    workers = data.draw(st.none() | st.integers(1, slots))
    processes = make(workers, given_hosts, communicator=communicator)
    placed = [host.name for host in given_hosts for _ in range(host.slots)][:workers]
    assert [p.host for p in processes] == placed
    assert [p.name for p in processes] == [f"rank {r}" for r in range(len(placed))]
    for rank, process in enumerate(processes):
        found = detect(process.env)
        assert (found.rank, found.size, found.hosts) == (rank, len(placed), tuple(placed))
        assert found.local_rank == placed[:rank].count(placed[rank])
        assert found.local_size == placed.count(placed[rank])


@given(hosts)
def test_cross_ranks_number_the_ranks_with_the_same_local_rank(given_hosts):
    groups: dict[str, list[tuple[int, int]]] = {}
    for process in make(None, given_hosts, communicator="horovod"):
        group = groups.setdefault(process.env["HOROVOD_LOCAL_RANK"], [])
        group.append(
            (int(process.env["HOROVOD_CROSS_RANK"]), int(process.env["HOROVOD_CROSS_SIZE"]))
        )
    for group in groups.values():
        assert group == [(i, len(group)) for i in range(len(group))]


def test_this_machine_listens_on_loopback_alone():
    assert [p.address for p in make(2)] == ["127.0.0.1:5000", "127.0.0.1:5001"]
    assert {p.env["HOROVOD_GLOO_IFACE"] for p in make(2, communicator="horovod")} == {"lo"}


def test_cores_are_divided_between_the_ranks_of_a_host():
    processes = make(None, [Host("a", 3), Host("b", 1)])
    assert [p.env["OMP_NUM_THREADS"] for p in processes] == ["2", "2", "2", "8"]
    assert {p.env["TF_NUM_INTRAOP_THREADS"] for p in make(20)} == {"1"}


def test_what_the_user_set_stays():
    user = {"OMP_NUM_THREADS": "7", "TF_CPP_MIN_LOG_LEVEL": "0", "TF_CONFIG": "{}"}
    user |= {"GLIBC_TUNABLES": "glibc.malloc.check=3"}
    (process,) = make(1, environ=user)
    assert process.env["GLIBC_TUNABLES"] == "glibc.malloc.check=3"
    assert (process.env["OMP_NUM_THREADS"], process.env["TF_CPP_MIN_LOG_LEVEL"]) == ("7", "0")
    assert process.env["TF_NUM_INTEROP_THREADS"] == "8"
    assert process.env["PYTHONUNBUFFERED"] == "1"
    assert "worker" in process.env["TF_CONFIG"]


def test_parameter_servers_get_a_chief_as_rank_0():
    processes = make(2, ps=1, evaluator=True)
    assert [p.name for p in processes] == ["rank 0", "rank 1", "rank 2", "ps 0", "evaluator 0"]
    assert [p.role for p in processes] == ["chief", "worker", "worker", "ps", "evaluator"]
    assert len({p.address for p in processes}) == 5
    assert [detect(p.env).size for p in processes] == [3] * 5


@given(hosts)
def test_ranks_of_a_host_are_bound_to_parts_of_it(given_hosts):
    processes = make(None, given_hosts)
    for host in given_hosts:
        parts = [p.cores for p in processes if p.host == host.name]
        if host.slots == 1:
            assert parts == [()], "alone, it needs no part"
        else:
            assert [core for part in parts for core in part] == list(range(8))
            assert {len(part) for part in parts} <= {8 // host.slots, 8 // host.slots + 1}


@pytest.mark.parametrize(
    "options",
    [
        {"bind": False},
        {"workers": 9},
        {"ps": 1},
        {"environ": {"OMP_NUM_THREADS": "5"}},
        {"environ": {"TF_NUM_INTRAOP_THREADS": "8"}},
    ],
    ids=["told not to", "more ranks than cores", "servers", "more threads", "more in TensorFlow"],
)
def test_ranks_are_not_bound_where_that_would_hold_them_back(options):
    assert {p.cores for p in make(**{"workers": 2, **options})} == {()}


def test_fewer_threads_than_cores_leave_ranks_bound():
    environ = {"OMP_NUM_THREADS": "2,2", "TF_NUM_INTRAOP_THREADS": "3"}
    assert [p.cores for p in make(2, environ=environ)] == [(0, 1, 2, 3), (4, 5, 6, 7)]


def test_only_those_that_compute_share_the_cores():
    # 8 cores: the two workers and the evaluator; the chief and the servers mostly wait.
    processes = make(2, ps=4, evaluator=True)
    assert {p.env["OMP_NUM_THREADS"] for p in processes} == {"2"}
    processes = make(1, [Host("a", 1), Host("b", 1)], ps=2)  # b has a server alone
    assert {p.host: p.env["OMP_NUM_THREADS"] for p in processes} == {"a": "8", "b": "8"}


@given(hosts, st.integers(1, 4), st.booleans())
def test_the_tasks_beside_the_workers_go_round_the_hosts(given_hosts, ps, evaluator):
    processes = make(None, given_hosts, ps=ps, evaluator=evaluator)
    slots = [host.name for host in given_hosts for _ in range(host.slots)]
    assert [p.host for p in processes if p.role == "worker"] == slots
    round_trip = [given_hosts[i % len(given_hosts)].name for i in range(1 + ps + evaluator)]
    assert [p.host for p in processes if p.role != "worker"] == round_trip
    for process in processes:
        found = detect(process.env)
        assert (found.role, found.rank, found.size) == (
            process.role,
            process.rank,
            1 + len(slots),
        )


def test_real_ports_are_free_and_different():
    addresses = [p.address for p in assign(COMMAND, 3)]
    assert len(set(addresses)) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "-n 0: expected 1 or more"),
        ({"workers": 10**20}, "workers on 1 host.*1024 at most"),
        ({"hosts": [Host("a", 10**9)]}, "1000000000 workers on 1 host"),
        ({"workers": 1, "ps": 100_000}, "100000 parameter servers on 1 host"),
        ({}, "the number of processes is not given"),
        ({"workers": 3, "hosts": [Host("a", 2)]}, "-n 3: a:2 have 2 slots; use -n 2"),
        (
            {"workers": 1, "communicator": "nccl"},
            "nccl: unknown, expected auto, collective, horovod, mpi",
        ),
        ({"workers": 1, "ps": -1}, "--ps -1: expected 0 or more"),
        ({"workers": 1, "ps": 1, "communicator": "horovod"}, "need the collective communicator"),
        ({"workers": 1, "evaluator": True}, "evaluator needs parameter servers .* --ps 1"),
        ({"hosts": [Host("localhost"), Host("a")]}, "other hosts cannot reach localhost"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ClusterError, match=message):
        make(**arguments)
    with pytest.raises(ClusterError, match="no command"):
        assign([], 1)
