"""Choosing and starting a communicator, and what is said when it cannot be."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from dtk import communicators
from dtk.cluster import Place, mpi_installs, mpi_join, mpi_server, slurm, startup_barrier
from dtk.cluster.line import introduce
from dtk.cluster.mpi_server import MPIServer
from dtk.communicators import LocalCommunicator, create, startup
from dtk.errors import CommunicatorError
from dtk.strategies import AllReduceStrategy
from dtk.version import pip_install

from support.launched import until

pytestmark = pytest.mark.command


def free_address():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def installed(monkeypatch):
    """Say whether Horovod and mpi4py are here; nothing is of a launcher until the test says so."""
    for name in ("PMIX_RANK", "PMI_RANK", "SLURM_MPI_TYPE"):
        monkeypatch.delenv(name, raising=False)

    def say(horovod=True, mpi=True):
        monkeypatch.setattr(communicators, "horovod_installed", lambda: horovod)
        monkeypatch.setattr(communicators, "mpi_installed", lambda: mpi)

    say()
    return say


def run_rank(rank, addresses, before="", **env):
    """Start one rank of a world in a process of its own; returns it."""
    script = textwrap.dedent(f"""
        from dtk.cluster import Place
        from dtk.communicators import create
        {before}
        world = Place("tf_config", {rank}, {len(addresses)}, addresses={(*addresses,)})
        comm = create("collective", world)
        import tensorflow as tf
        print(comm.allreduce(tf.constant(comm.rank + 1)).numpy())
    """)
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process, timeout=60):
    try:
        return *process.communicate(timeout=timeout), process.returncode
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "kind, size, horovod, expected",
    [
        ("mpi", 2, False, "mpi"),
        ("horovod", 2, False, "horovod"),
        ("single", 1, True, "local"),
        ("mpi", 1, True, "local"),
        ("mpi", 2, True, "horovod"),
        ("horovod", 2, True, "horovod"),
        ("slurm", 2, True, "horovod"),
        ("slurm", 2, False, "mpi"),
        ("tf_config", 2, False, "collective"),
    ],
)
def test_auto(monkeypatch, installed, kind, size, horovod, expected):
    installed(horovod=horovod)
    monkeypatch.setenv("PMIX_RANK", "0")
    monkeypatch.setattr(communicators, "offer", str)
    assert communicators.choose(Place(kind, 0, size)).name == expected
    if kind == "tf_config":
        monkeypatch.setattr(communicators, "offer", lambda: "MPI beside Python")
        assert communicators.choose(Place(kind, 0, size)).name == "mpi"


def test_where_srun_offers_mpi_nothing_dtk_joins_ranks_and_horovod_is_refused(
    monkeypatch, installed
):
    """By MPI alone they would end at once, or each see a world of one."""
    monkeypatch.setattr(communicators, "offer", lambda: "MPI beside Python")
    assert communicators.choose(Place("slurm", 0, 2)).name == "mpi"
    monkeypatch.setattr(communicators, "offer", str)
    for variables in ({}, {"PMI_RANK": "0", "PMI_FD": "11"}):
        with monkeypatch.context() as other:
            for name, text in variables.items():
                other.setenv(name, text)
            name, why = communicators.choose(Place("slurm", 0, 2))
        assert name == "collective" and why.endswith("Faster: `srun --mpi=pmix`")
    told = r"rank 1: .*nothing to find them by \(--mpi=none\): start with `srun --mpi=pmix`"
    with pytest.raises(CommunicatorError, match=told):
        create("horovod", Place("slurm", 1, 2))
    assert not communicators.has_mpi_launcher(Place("slurm", 1, 2))
    for variable in ("PALS_RANKID", "I_MPI_PMI_LIBRARY", "PMI_RANK"):
        with monkeypatch.context() as other:
            other.setenv(variable, "0")
            other.setattr(communicators, "offer", lambda: "MPI beside Python")
            assert communicators.has_mpi_launcher(Place("slurm", 1, 2))
            assert communicators.choose(Place("slurm", 1, 2)).name == "collective"


def test_a_name_that_means_loopback_here_is_listened_for_everywhere(monkeypatch):
    """Debian gives a host's own name 127.0.1.1; other hosts come to its address."""

    def resolve(host, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    alone = "127.0.1.1"
    for world, expected in (
        (["n1:0", "n2:0"], "0.0.0.0"),
        (["n1:0", "n1:0"], alone),
        (["n1:0", "localhost:1"], alone),
    ):
        with startup._listen("n1:0", startup._has_others("n1:0", world)) as listener:
            assert listener.getsockname()[0] == expected


def test_one_process_needs_nothing():
    for name in ("auto", "local", "collective"):
        assert isinstance(create(name, Place("single", 0, 1)), LocalCommunicator)


@pytest.mark.parametrize("name", [name for name in communicators.NAMES if name != "local"])
@pytest.mark.parametrize("role", ["ps", "evaluator"])
def test_roles_that_do_not_train_are_refused(monkeypatch, role, name):
    """Their index is 0 too: as rank 0 they would answer for the chief, and both would hang."""
    cluster = {"chief": [free_address()], "worker": [free_address()], role: [free_address()]}
    config = {"cluster": cluster, "task": {"type": role, "index": 0}}
    monkeypatch.setenv("DTK_RUN", "1")
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setenv("DTK_START_TIMEOUT", "2")  # if it does try
    told = f"this process is {role} 0 .*TF_CONFIG.* takes no part in all-reduce training; start it"
    for make in (create, AllReduceStrategy):
        with pytest.raises(CommunicatorError, match=told):
            make(name)


def test_horovod_missing(installed):
    installed(horovod=False, mpi=False)
    told = f"`{re.escape(pip_install('mpi'))}` or `dtk install-horovod`, or start with `dtk run`"
    with pytest.raises(CommunicatorError, match=told):
        create("auto", Place("mpi", 0, 2))
    with pytest.raises(CommunicatorError, match=re.escape(f"run `{pip_install('mpi')}`")):
        create("mpi", Place("mpi", 0, 2))


def test_horovod_is_not_taken_under_the_mpirun_of_python(monkeypatch, installed):
    """Its libraries are of another MPI, and do not load there."""
    monkeypatch.setenv("OPAL_PREFIX", sys.prefix)
    assert communicators.choose(Place("mpi", 0, 2)).name == "mpi"
    monkeypatch.setattr(sys, "argv", ["train.py"])
    told = r"start with that one's, `\S+mpirun -np 2 python train.py`, or .* communicator='mpi'"
    with pytest.raises(CommunicatorError, match=told):
        create("horovod", Place("mpi", 0, 2))
    monkeypatch.setenv("OPAL_PREFIX", "/usr")
    assert communicators.choose(Place("mpi", 0, 2)).name == "horovod"


def test_a_variable_says_what_auto_is(monkeypatch):
    monkeypatch.setenv("DTK_COMMUNICATOR", "null")
    assert create("auto", Place("mpi", 1, 3)).name == "null"
    monkeypatch.setenv("DTK_COMMUNICATOR", "carrier")
    with pytest.raises(ValueError, match="'carrier' in DTK_COMMUNICATOR; use one of auto, coll"):
        create("auto", Place("mpi", 1, 3))


def test_mistakes(monkeypatch):
    with pytest.raises(ValueError, match="'carrier'; use one of auto, collective, horovod, mpi, "):
        create("carrier")
    with pytest.raises(ValueError, match="rank=4 is not a rank of 4"):
        create("null", Place("single", 4, 4))
    with pytest.raises(CommunicatorError, match="rank 1: .* each of 2 ranks, got 0: start with"):
        create("collective", Place("slurm", 1, 2))
    for address in ("nowhere", "host:", ":1", "host:port"):
        with pytest.raises(CommunicatorError, match="expected host:port"):
            startup.parse_address(address)
    for text in ("soon", "0", "-3", "inf"):  # of the last, no timer could be set
        monkeypatch.setenv("DTK_START_TIMEOUT", text)
        with pytest.raises(CommunicatorError, match=f"TIMEOUT='{text}': expected seconds, above"):
            startup.limit()


def test_a_port_in_use_names_the_holder_and_one_that_is_only_reserved_is_free():
    """The launcher holds ports for its ranks this way."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        startup.check_free(0, address)
        held.listen()
        told = f"rank 0: cannot .* own address {address}: in use by process {os.getpid()} "
        with pytest.raises(CommunicatorError, match=told):
            create("collective", Place("tf_config", 0, 2, addresses=(address, "a:1")))


def refused(*calls):
    """What ranks that meet, each by a call, are told."""

    def told(call):
        with pytest.raises(CommunicatorError) as error:
            startup.meet(*call)
        return str(error.value)

    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(told, calls, timeout=20))


def test_missing_ranks_are_named_on_every_rank_that_came(monkeypatch, capsys):
    monkeypatch.setattr(startup_barrier, "AFTER", 0.5)
    addresses = [free_address() for _ in range(3)]
    for index, error in enumerate(refused((0, addresses, 1.5), (1, addresses, 1.5))):
        assert error.startswith(f"rank {index}: the world of 3 is not complete after 1.5 s")
        assert f"no word from rank 2 ({addresses[2]})" in error
    # What rank 1 waits for, only rank 0 knows.
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"dtk: rank 0: waiting for rank 2 ({addresses[2]}), for 1 s more ")


def test_rank_0_missing(monkeypatch, capsys):
    """A rank knocks often at first and then seldom, and says for whom it waits."""
    monkeypatch.setattr(startup_barrier, "AFTER", 0.1)
    pauses, here = [], threading.current_thread()

    def sleep(seconds, sleep=time.sleep):
        if threading.current_thread() is here:
            pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(startup.time, "sleep", sleep)
    addresses = [free_address(), free_address()]
    with pytest.raises(CommunicatorError, match=f"rank 1: no answer from rank 0 .{addresses[0]}"):
        startup.meet(1, addresses, 1.0)
    (said,) = capsys.readouterr().err.splitlines()
    assert f"rank 1: waiting for rank 0, which does not answer at {addresses[0]}, for " in said
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.01, 0.1)


def test_ranks_of_different_worlds_do_not_mix():
    addresses = [free_address(), free_address()]
    for told in refused((0, addresses, 5), (1, [addresses[0], "127.0.0.1:1"], 5)):
        assert "rank 1 was told another world" in told


def meet_at(address, *ranks, size=3, timeout=20.0):
    """Return the addresses that each of these ranks was told, or its error."""

    def meet(rank):
        try:
            return startup.exchange_addresses(rank, size, address, timeout).addresses
        except CommunicatorError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(meet, ranks, timeout=40))


def test_ranks_that_know_rank_0_alone_exchange_addresses():
    addresses = meet_at(free_address(), 0, 1, 2)
    assert len(set(addresses)) == 1
    ports = [startup.parse_address(one)[1] for one in addresses[0]]
    assert len(set(ports)) == 3 and all(port in slurm.PORTS for port in ports)


def test_who_ended_before_the_meeting_may_come_again():
    """As a pod that is started again does."""
    address = free_address()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        rank_0 = threads.submit(meet_at, address, 0)
        while not startup.answers(address):
            pass
        with socket.create_connection(startup.parse_address(address)) as end:
            first = introduce(end, b"", is_listener=False)
            first.receive_one(30)
            first.send({"rank": 1, "world": 3, "port": 1})
        assert meet_at(address, 1, 2) == rank_0.result(30) * 2


OF_TORCHRUN = """
    import os, dtk, keras, numpy as np
    strategy = dtk.auto_strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    tasks = strategy.cluster_resolver.cluster_spec().as_dict()["worker"]
    steps = model.optimizer.iterations.numpy()
    name = strategy.communicator.name
    assert dtk.auto_strategy().communicator is strategy.communicator
    print(strategy.rank, strategy.size, len(tasks), steps, name, flush=True)
"""
ENDS_IN_RANK_1 = """
    if strategy.rank == 1:
        os._exit(9)
    while True:
        strategy.communicator.barrier()
"""
ENDS_IN_FIT = """
    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 20 and strategy.rank == 1:
                os._exit(9)
    model.fit(np.ones((6000, 2)), np.ones((6000, 1)), batch_size=6, verbose=0, callbacks=[Ends()])
"""
needs_mpi = pytest.mark.skipif(
    mpi_installs.mpirun() is None, reason="no MPI beside python: pip install './dtk[mpi]'"
)


def ends_of_torchruns(script, *of_ranks, **variables):
    """How two ranks end that have the variables of torchrun, and each some of its own."""
    host, port = free_address().split(":")
    knows = {"WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port, **variables}
    ranks = [
        start_rank(script, **{"RANK": str(rank), **knows, **own})
        for rank, own in enumerate(of_ranks or ({}, {}))
    ]
    return [end(rank) for rank in ranks]


@pytest.mark.parametrize("name", ["collective", pytest.param("mpi", marks=needs_mpi)])
def test_two_ranks_train_by_the_variables_of_torchrun_and_who_loses_the_other_says_try_again(name):
    ends = ends_of_torchruns(OF_TORCHRUN + ENDS_IN_RANK_1, DTK_COMMUNICATOR=name)
    printed = [stdout for stdout, _, _ in ends]
    assert printed == [f"0 2 2 2 {name}\n", f"1 2 2 2 {name}\n"], ends[0][1]
    assert [code for _, _, code in ends] == [75, 9], ends[0][1]
    if name == "mpi":
        assert "rank 1, host " in ends[0][1] and "was gone first" in ends[0][1]


def test_a_lost_rank_ends_the_job_of_an_engine_also_where_tensorflow_does_not_see_it():
    """A rank killed in the middle of an exchange; the other waited for the stall timeout."""
    waits = """
    from dtk.cluster import progress
    if strategy.rank == 1:
        os._exit(9)
    import time
    with progress.inside("an exchange"):
        time.sleep(50)
    """
    began = time.monotonic()
    ends = ends_of_torchruns(OF_TORCHRUN + waits, DTK_COMMUNICATOR="collective")
    assert [code for _, _, code in ends] == [75, 9], ends[0][1]
    assert "rank 1, host " in ends[0][1] and "was gone first" in ends[0][1]
    assert time.monotonic() - began < 50


@needs_mpi
def test_ranks_of_one_machine_are_joined_by_mpi_and_leave_nothing(tmp_path):
    ends = ends_of_torchruns(OF_TORCHRUN, TMPDIR=str(tmp_path), DTK_STALL_TIMEOUT="0")
    assert [out for out, _, _ in ends] == [f"{rank} 2 2 2 mpi\n" for rank in range(2)], ends
    assert [code for _, _, code in ends] == [0, 0]
    assert not any(who in err for _, err, _ in ends for who in ("dtk:", "OPAL", "PRTE", "PMIX"))
    until(lambda: list(tmp_path.iterdir()) == [])  # the last process removes the rest


@needs_mpi
def test_ranks_of_which_one_cannot_join_by_mpi_are_joined_by_collectives_or_told_why_not(
    monkeypatch, tmp_path
):
    # A world of its own that ends with an error leaves its memory there.
    monkeypatch.setenv("OMPI_MCA_btl_sm_backing_directory", str(tmp_path))
    begins = """
    import os
    if os.environ["RANK"] == "1":
        from mpi4py import MPI  # a world of its own
    """
    ends = ends_of_torchruns(begins + OF_TORCHRUN)
    assert [out for out, _, _ in ends] == [f"{rank} 2 2 2 collective\n" for rank in range(2)]
    ends = ends_of_torchruns(begins + OF_TORCHRUN, DTK_COMMUNICATOR="mpi")
    for _, err, code in ends:
        assert "dtk joins ranks by MPI itself only where each has room in /dev/shm" in err
        assert code == 1


@needs_mpi
def test_ranks_of_several_machines_are_joined_by_mpi_without_a_remote_shell(many_hosts, tmp_path):
    """As in pods: nothing starts processes there but the engine that has started the ranks."""
    (first, second), shell = many_hosts(2)
    knows = {"WORLD_SIZE": "3", "MASTER_ADDR": first, "MASTER_PORT": "4000"}
    for ending, codes in [("", [0, 0, 0]), (ENDS_IN_FIT, [75, 9, 75])]:
        ranks = [
            start_rank(
                OF_TORCHRUN.replace("(8,", "(12,").replace("=4,", "=6,") + ending,
                (shell, host),
                RANK=str(rank),
                TMPDIR=str(tmp_path),
                **knows,
            )
            for rank, host in enumerate([first, second, first])
        ]
        ends = [end(rank) for rank in ranks]
        assert [out for out, _, _ in ends] == [f"{rank} 3 3 2 mpi\n" for rank in range(3)], ends
        assert [code for _, _, code in ends] == codes, ends
        assert not ending or re.search("rank 1, host dtk.*2, was gone first", ends[0][1])
        until(lambda: list(tmp_path.iterdir()) == [])


@needs_mpi
def test_a_rank_that_is_gone_once_the_server_runs_is_awaited_again(monkeypatch):
    """An engine starts it again. The others went on without, and waited in MPI's start."""
    addresses, offer = [free_address(), free_address()], mpi_join.offer()

    def come():
        end = socket.create_connection(startup.parse_address(addresses[0]))
        line = introduce(end, b"", is_listener=False, patience=30)
        line.receive_one(30)
        line.send({"rank": 1, "world": addresses, "mpi": offer})
        return line

    class Server(MPIServer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if lines:
                lines.pop().end.close()

    monkeypatch.setattr(mpi_join, "MPIServer", Server)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        rank_0 = pool.submit(startup.meet, 0, addresses, 30, offer)
        while not startup.answers(addresses[0]):
            pass
        lines = [come()]

        def come_again():
            line = come()
            with line.end:
                return line.receive_one(30)

        again = pool.submit(come_again)
        try:
            until(lambda: not lines)
            assert again.result(30)["mpi"]["PMIX_RANK"] == "1"
            assert rank_0.result(30).mpi["PMIX_RANK"] == "0"
            assert len(mpi_join._kept) == 1
        finally:
            mpi_join.end_server()


def test_a_job_s_secret_stays_where_it_is(monkeypatch):
    """MPI sends the variables of its daemons in clear."""
    monkeypatch.setenv("DTK_JOB_SECRET", "a")
    assert "DTK_JOB_SECRET" not in mpi_server._environment()


def start_rank(script, where=(), **variables):
    """Start a process that knows its rank by these variables; `where` is a shell and its host."""
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.Popen(
        [*where, shlex.join(command)] if where else command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_exit_code_tells_a_rank_that_misses_others_from_a_script_that_fails():
    """Engines start the first again. Both ended with 1, and so a mistake was tried for ever."""
    knows = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "rank0.invalid"}
    rank = start_rank("import dtk; dtk.auto_strategy()", DTK_START_TIMEOUT="1", **knows)
    _, stderr, code = end(rank)
    assert code == 75, stderr
    assert "no answer from rank 0 (rank0.invalid:29500) within 1 s: its name means no " in stderr
    rank = start_rank("import dtk; dtk.auto_strategy()", **knows | {"WORLD_SIZE": "1"})
    assert end(rank)[2] == 1


def test_a_task_whose_own_name_is_not_known_yet_listens_all_the_same():
    """DNS tells a pod's name a while after it has started; it was refused at once."""
    own = f"pod.invalid:{free_address().partition(':')[2]}"
    startup.check_free(0, own, [own, "other.invalid:1"])
    with pytest.raises(CommunicatorError, match="cannot listen on its own address pod.invalid"):
        startup.check_free(0, own)


def test_another_secret_is_told_on_both_ends(monkeypatch):
    addresses = [free_address(), free_address()]
    monkeypatch.setenv("DTK_JOB_SECRET", "a")
    script = f"""
        from dtk.communicators import startup
        print(flush=True)
        startup.meet(1, {addresses}, 30)
    """
    rank = start_rank(script, DTK_JOB_SECRET="b")
    rank.stdout.readline()
    (told,) = refused((0, addresses, 3.0))
    assert "127.0.0.1 came who is no rank of this job, or has another DTK_JOB_SECRET" in told
    _, stderr, code = end(rank)
    assert code == 1 and "rank 1: what answers at 127.0.0.1:" in stderr


def test_strangers_at_the_door_are_ignored():
    addresses = [free_address(), free_address()]
    met = threading.Thread(target=startup.meet, args=(0, addresses, 20))
    met.start()
    while not startup.answers(addresses[0]):  # itself such a stranger
        pass
    with socket.create_connection(startup.parse_address(addresses[0])) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    startup.meet(1, addresses, 20)
    met.join(20)
    assert not met.is_alive()


@pytest.mark.full("a cheaper test holds its rule")
def test_a_peer_that_dies_during_bring_up_does_not_leave_the_other_waiting():
    """TensorFlow waits in C++ with the interpreter lock held, deaf to signals."""
    addresses = [free_address(), free_address()]
    process = run_rank(0, addresses, DTK_START_TIMEOUT="8")
    startup.meet(1, addresses, 60)  # says hello, and never starts TensorFlow
    _, stderr, code = end(process)
    assert code == -signal.SIGALRM, "with 1, engines would not try again"
    assert "Timeout" in stderr
    assert "collective.py" in stderr


@pytest.mark.full("a cheaper test holds its rule")
def test_two_ranks_come_up_without_noise():
    addresses = [free_address(), free_address()]
    ranks = [run_rank(rank, addresses) for rank in range(2)]
    for rank in ranks:
        stdout, stderr, code = end(rank)
        assert (stdout, code) == ("3\n", 0), stderr
        assert "INFO" not in stderr
        assert "Traceback" not in stderr


@pytest.mark.full("a cheaper test holds its rule")
def test_a_tensor_before_the_strategy_is_refused():
    addresses = [free_address(), free_address()]
    late = "import tensorflow as tf; tf.ones([1])"
    for index, rank in enumerate([run_rank(rank, addresses, before=late) for rank in range(2)]):
        _, stderr, code = end(rank)
        assert code == 1
        assert f"rank {index}: TensorFlow has already run an operation" in stderr
