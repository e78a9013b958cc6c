"""Starting the processes of a job, here and on other hosts, and what they need before that."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dtk.cluster import mpi_installs, report_channel
from dtk.cluster.variables import COMMUNICATOR
from dtk.errors import ClusterError, CommunicatorError
from dtk.launch import agent, job_processes, machines, mpi_places
from dtk.launch.plan import Process

_LEAVES = 5.0  # seconds that the guard has to leave, once it is told to


class PortTakenError(ClusterError):
    """A port that was free when the job was planned is not any more."""


class Started(NamedTuple):
    """A process of a job."""

    popen: subprocess.Popen[bytes]  # the process, or the remote shell that leads to it
    # where its reports are read; None behind a remote shell, where they are in its standard error
    reports: socket.socket | None


class Starter:
    """Starts processes that carry the mark of one job.

    It also holds what outlives them: the guard process, Horovod's rendezvous server, MPI's and
    ports.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        job_id: str,
        grace: float,
        save_grace: float,
        remote_shell: str,
        say: Callable[[str], None],
    ) -> None:
        self._processes = processes
        self._served = any(process.role == "ps" for process in processes)
        self._job_id = job_id
        self._grace, self._save_grace = grace, save_grace
        self._remote_shell = remote_shell
        self._held: contextlib.ExitStack = contextlib.ExitStack()
        self._say = say
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "dtk starter")
        self._shared: dict[str, str] = {}
        self._places: list[dict[str, str]] = []
        self._mpi: mpi_places.MPIPlaces | None = None
        self._local_hosts: set[str] = set()

    def prepare(self) -> None:
        """Start the guard and the rendezvous server, and hold the ports of this machine's ranks."""
        self._guard = Guard(self._job_id, self._grace, self._save_grace)
        self._held.callback(self._guard.close)
        if needs_rendezvous(self._processes):
            server = Rendezvous(self._processes)
            self._held.callback(server.close)
            self._shared = server.env
        self._start_mpi()
        self._local_hosts = {p.host for p in self._processes if machines.is_local(p.host)}
        for process in self._processes:
            if process.address and not self.is_remote(process):
                self._hold_port(process)

    def note_saving(self, pid: int, ready: bool) -> None:
        """Tell the guard whether a rank of this machine would save a checkpoint."""
        self._guard.note_saving(pid, ready)

    def lost(self) -> mpi_places.Loss | None:
        """Return how MPI's server, which all ranks need, has ended; None while it runs."""
        return None if self._mpi is None else self._mpi.lost()

    def held_up(self) -> str:
        """Return what may keep the ranks from starting together, for a sentence; "" if nothing."""
        return "" if self._mpi is None else self._mpi.held_up()

    def close(self) -> None:
        """Let go of the guard, the rendezvous server and the ports."""
        self._held.close()
        self._thread.shutdown()

    def is_remote(self, process: Process) -> bool:
        """Return whether a process runs on another host, behind the remote shell."""
        return process.host not in self._local_hosts

    def env(self, process: Process) -> dict[str, str]:
        """Return a process's variables: those of the plan, and those known only since `prepare`."""
        place = self._places[process.rank] if self._places else {}
        return {**process.env, **self._shared, **place}

    def popen(self, process: Process, env: Mapping[str, str]) -> Started:
        # A rank is asked to end when the thread that started it does. This one ends with the job.
        return self._thread.submit(self._popen, process, env).result()

    def _popen(self, process: Process, env: Mapping[str, str]) -> Started:
        remote = self.is_remote(process)
        serves = self._served and process.role != "chief"
        try:
            if not remote:
                mark = self.mark(process)
                reports, end = report_channel.pair()
                try:
                    with end:
                        popen = machines.start_here(
                            process.argv, env, mark, process.cores, serves, end
                        )
                except OSError:
                    reports.close()
                    raise
                return Started(popen, reports)
            popen = machines.start_there(
                process.host,
                process.argv,
                env,
                self.mark(process),
                address=process.address,
                cores=process.cores,
                grace=self._grace,
                save_grace=self._save_grace,
                serves=serves,
                remote_shell=self._remote_shell,
            )
            return Started(popen, None)
        except OSError as error:
            program = self._remote_shell.split()[0] if remote else process.argv[0]
            raise ClusterError(
                f"{process.name}: cannot start {program}: {error.strerror}; check that it exists"
            ) from None

    def mark(self, process: Process) -> str:
        """Return the mark of one process and its children: they end at different times."""
        return f"{self._job_id}/{process.name.replace(' ', '-')}"

    def _start_mpi(self) -> None:
        """Start MPI's server where the plan asks for it, or would like it."""
        asked = {process.env.get(COMMUNICATOR) for process in self._processes}
        must = "mpi" in asked
        if not must and ("auto" not in asked or mpi_installs.mpirun() is None):
            return
        try:
            places = mpi_places.MPIPlaces(
                [process.host for process in self._processes], self._job_id, self._remote_shell
            )
        except CommunicatorError as error:
            if must:
                raise
            self._say(f"going on over TensorFlow's collectives: {error}")
            return
        for folder in places.folders:
            self._guard.remove(folder)
        self._held.callback(places.close)
        self._mpi = places
        self._places = [{**env, COMMUNICATOR: "mpi"} for env in places.env]

    def _hold_port(self, process: Process) -> None:
        host, _, port = process.address.rpartition(":")
        try:
            self._held.enter_context(agent.reserve(host, int(port)))
        except OSError as error:
            raise PortTakenError(
                f"{process.name}: port {port} of {host} is taken ({error.strerror}); plan the "
                "job again"
            ) from None


class Guard:
    """A process that ends the job if this one is killed before it can.

    >>> Guard("example", grace=1.0).close()
    """

    def __init__(self, job: str, grace: float, save_grace: float = 0.0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", machines.BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._say(
            machines.first_line(
                {"task": "guard", "job": job, "grace": grace, "save_grace": save_grace}
            )
        )

    def remove(self, folder: Path) -> None:
        """Have a folder removed if this process is killed before it can."""
        self._say(f"remove {folder}\n")

    def note_saving(self, pid: int, ready: bool) -> None:
        """Tell whether a rank here would save a checkpoint, if it were asked to end."""
        with contextlib.suppress(OSError, ValueError):  # it is gone, or this job is over
            self._say(f"{'ready' if ready else 'over'} {pid}\n")

    def _say(self, line: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with self._lock:
            if job_processes.takes_more(pipe):  # one that is stopped reads nothing
                pipe.write(line)
                pipe.flush()

    def close(self) -> None:
        """Tell the guard that all is well, and wait for it to leave, or end it."""
        assert self._process.stdin is not None
        try:
            self._say("done\n")
            self._process.stdin.close()
        except OSError:
            pass  # it is gone already
        try:
            self._process.wait(_LEAVES)
        except subprocess.TimeoutExpired:  # it is stopped, as by SIGSTOP
            self._process.kill()
            self._process.wait()


class Rendezvous:
    """Horovod's HTTP server, by which ranks of a job over Gloo find each other."""

    def __init__(self, processes: Sequence[Process]) -> None:
        try:
            from horovod.runner.common.util.hosts import SlotInfo
            from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
        except ImportError as error:
            raise CommunicatorError(
                f"communicator horovod: Horovod is not installed ({error}); run `dtk "
                "install-horovod`"
            ) from None
        address = own_address([process.host for process in processes])
        # RendezvousServer.start() would listen on every interface; this is the same server on one.
        self._server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
        self._server.daemon_threads = True
        self._server.init(
            [
                SlotInfo(
                    process.env["HOROVOD_HOSTNAME"],
                    *(
                        int(process.env[f"HOROVOD_{name}"])
                        for name in (
                            "RANK",
                            "LOCAL_RANK",
                            "CROSS_RANK",
                            "SIZE",
                            "LOCAL_SIZE",
                            "CROSS_SIZE",
                        )
                    ),
                )
                for process in processes
            ]
        )
        self.env = {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._server.server_address[1]),
        }
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def needs_rendezvous(processes: Sequence[Process]) -> bool:
    """Return whether a plan's processes expect a rendezvous server.

    >>> needs_rendezvous([])
    False
    """
    return any(process.env.get("HOROVOD_CONTROLLER") == "gloo" for process in processes)


def own_address(hosts: Sequence[str]) -> str:
    """Return the address of this machine that all hosts can reach."""
    remote = [host for host in hosts if not machines.is_local(host)]
    if not remote:
        return (
            "127.0.0.1" if all(map(machines.is_loopback, hosts)) else socket.gethostbyname(hosts[0])
        )
    # Connecting a UDP socket sends nothing; it asks the routing table which address would be used.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((remote[0], 9))
        return str(probe.getsockname()[0])
