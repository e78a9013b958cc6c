"""Starting the processes of a job, here and on other hosts, and what they need before that."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from dtk.cluster import mpi_installs, progress, report_channel
from dtk.cluster.variables import COMMUNICATOR, OF_OTHER_LAUNCHERS, RESTARTS, is_foreign
from dtk.errors import ClusterError, CommunicatorError
from dtk.launch import agent, job_processes, mpi_servers, ssh
from dtk.launch.output import JobOutput
from dtk.launch.plan import Process
from dtk.launch.reader import Reader
from dtk.launch.task import JobState, Task

# Settings of the user's that ranks on other hosts need as well.
_LIBRARIES = ("TF_", "KERAS_", "HOROVOD_", "OMP_", "NCCL_", "XLA_", "CUDA_", "GRPC_")
FORWARDED = (*_LIBRARIES, "DTK_", "PYTHON")
_ENDS = 1.0  # seconds that a process has to end after it has closed everything
_WATCH = 2.0  # seconds between two looks at a rank from outside
# A process, or the remote shell that leads to it, and where its reports are read: None behind a
# remote shell, where they are in its standard error.
_Started: TypeAlias = tuple[subprocess.Popen[bytes], socket.socket | None]


class PortTakenError(ClusterError):
    """A port that was free when the job was planned is not any more."""


class Starter:
    """Starts processes that carry the mark of one job.

    It also holds what outlives them: the guard process, Horovod's rendezvous server, MPI's and
    ports.

    Attributes:
        mpi: MPI's servers, where there are some; all ranks need them.
    """

    def __init__(self, state: JobState, output: JobOutput) -> None:
        self._state, self._output = state, output
        self._served = any(process.role == "ps" for process in state.spec.processes)
        self._held = contextlib.ExitStack()
        self._shared: dict[str, str] = {}
        self.mpi = mpi_servers.MPIServers()
        self._local_hosts: set[str] = set()
        self._reader = Reader("dtk ranks", state.stop)

    def prepare(self) -> None:
        """Hold the ports of this machine's ranks; start the guard and the servers of ranks."""
        self._local_hosts = {p.host for p in self._state.spec.processes if ssh.is_local(p.host)}
        # First: the servers below are given free ports by the system too, and may get one of these.
        spec = self._state.spec
        for process in spec.processes:
            if process.address and process.host in self._local_hosts:
                host, _, port = process.address.rpartition(":")
                try:
                    self._held.enter_context(agent.reserve(host, int(port)))
                except OSError as error:
                    raise PortTakenError(
                        f"{process.name}: port {port} of {host} is taken ({error.strerror}); plan "
                        "the job again"
                    ) from None
        self._guard = ssh.Guard(self._state.job_id, spec.grace, spec.save_grace)
        self._held.callback(self._guard.close)
        if any(one.env.get("HOROVOD_CONTROLLER") == "gloo" for one in spec.processes):
            self._shared = _start_rendezvous(spec.processes, self._held)
        self._start_mpi()

    def _start_mpi(self) -> None:
        """Start MPI's servers where the plan asks for them, or would like them."""
        spec = self._state.spec
        asked = {process.env.get(COMMUNICATOR) for process in spec.processes}
        must = "mpi" in asked
        if not must and ("auto" not in asked or mpi_installs.unasked() is None):
            return
        self._held.callback(self.mpi.close)
        try:
            self.mpi.start(spec.processes, self._state.job_id, spec.remote_shell)
        except CommunicatorError as error:
            if must:
                raise
            self.mpi.close()
            self._output.say(f"going on over TensorFlow's collectives: {error}")

    def beat(self) -> None:
        """Tell other hosts that this process is alive."""
        self.mpi.beat()
        for rank in self._state.tasks:
            if rank.remote and rank.code is None:
                report_channel.write_line(rank.popen.stdin, "")

    def close(self) -> None:
        """Let go of the guard, the servers and the ports."""
        self._reader.close()
        self._held.close()

    def start(self, process: Process) -> None:
        """Start a process of the plan, and add it to the ranks."""
        env = {**process.env, **self._shared}
        env[progress.VARIABLE] = f"{self._state.spec.stall_timeout:g}"  # those watched report
        if self.mpi.env:
            env |= {**self.mpi.env[process.rank], COMMUNICATOR: "mpi"}
        popen, reports = self._popen(process, env)
        remote = process.host not in self._local_hosts
        rank = Task(process, env, remote, popen, self._guard, self._state.events)
        self._state.tasks.append(rank)
        self._output.open_file(rank)
        self._attend(rank, reports)

    def start_again(self, rank: Task) -> None:
        """Start the successor of a process that is gone."""
        popen, reports = self._popen(rank.process, {**rank.env, RESTARTS: str(rank.restarts)})
        with self._state.changed:
            rank.started(popen)
        self._attend(rank, reports)

    def _attend(self, rank: Task, reports: socket.socket | None) -> None:
        """Read what a process writes and reports, and note its end."""
        self._output.relay(rank)
        if reports is not None:
            rank.reports = reports
            self._reader.add(reports.fileno(), functools.partial(self._hear, rank, reports))
        over = threading.Event()
        rank.open.append(over)
        threading.Thread(target=self._await_end, args=(rank, over), daemon=True).start()

    def _hear(self, rank: Task, reports: socket.socket) -> bool:
        if message := report_channel.receive(reports):
            rank.hear(message)
            return True
        reports.close()
        self._reader.call_later(_ENDS, functools.partial(self._note_silence, rank, reports))
        return False

    def _note_silence(self, rank: Task, reports: socket.socket) -> None:
        """Say that a process runs on, and reports nothing any more."""
        is_watched = bool(self._state.spec.stall_timeout)
        if is_watched and rank.reports is reports and rank.code is None:
            rank.status = rank.new_status()
            self._output.say(
                f"{rank.process.name} has closed the descriptor of its reports "
                f"({report_channel.VARIABLE}): if it is stuck, that is not noticed any more"
            )

    def _await_end(self, rank: Task, over: threading.Event) -> None:
        code = rank.popen.wait()
        with self._state.changed:
            rank.ended(code)
            self._state.changed.notify_all()
        over.set()

    def _popen(self, process: Process, env: Mapping[str, str]) -> _Started:
        here = process.host in self._local_hosts
        try:
            return (self._start_here if here else self._start_there)(process, env)
        except OSError as error:
            program = process.argv[0] if here else self._state.spec.remote_shell.split()[0]
            raise ClusterError(
                f"{process.name}: cannot start {program}: {error.strerror}; check that it exists"
            ) from None

    def _start_here(self, process: Process, env: Mapping[str, str]) -> _Started:
        """Start a rank in a session of its own: a terminal's Ctrl-C reaches the launcher alone."""
        own = {name: value for name, value in os.environ.items() if not is_foreign(name)}
        reports, end = report_channel.pair()
        self._held.enter_context(reports)
        with end:
            popen = job_processes.start(
                process.argv,
                {**own, **env, **report_channel.variables(end)},
                self._state.mark(process),
                process.cores,
                output=subprocess.PIPE,
                keeps=[end.fileno()],
            )
        return popen, reports

    def _start_there(self, process: Process, env: Mapping[str, str]) -> _Started:
        """Start a rank on another host.

        Closing its standard input ends the rank over there, and so does losing the connection. A
        lost connection may only fall silent, so `SILENCE` seconds without a line end the rank, too:
        write an empty one every `HEARTBEAT` seconds. Its standard error also carries the agent's
        records, see `report_channel.split_records`.
        """
        forwarded = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(FORWARDED) and not is_foreign(name)
        }
        spec = self._state.spec
        popen = ssh.start_agent(
            ssh.remote_command(process.host, spec.remote_shell),
            "rank",
            subprocess.PIPE,
            argv=process.argv,
            env={**forwarded, **env},
            cwd=os.getcwd(),
            job=self._state.mark(process),
            grace=spec.grace,
            save_grace=spec.save_grace,
            serves=self._served and process.role != "chief",
            watch_every=min(_WATCH, spec.stall_timeout / 10),
            reserved=process.address,
            cores=list(process.cores),
            foreign=OF_OTHER_LAUNCHERS,
            silence=ssh.SILENCE,
        )
        return popen, None


def _start_rendezvous(processes: Sequence[Process], held: contextlib.ExitStack) -> dict[str, str]:
    """Start Horovod's HTTP server, by which ranks over Gloo find each other; return its address."""
    try:
        from horovod.runner.common.util.hosts import SlotInfo
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer
    except ImportError as error:
        raise CommunicatorError(
            f"communicator horovod: Horovod is not installed ({error}); run `dtk install-horovod`"
        ) from None
    address = own_address([process.host for process in processes])
    # RendezvousServer.start() would listen on every interface; this is the same server on one.
    server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
    server.daemon_threads = True
    numbers = ("RANK", "LOCAL_RANK", "CROSS_RANK", "SIZE", "LOCAL_SIZE", "CROSS_SIZE")
    slots = []
    for env in (process.env for process in processes):
        own = [int(env[f"HOROVOD_{name}"]) for name in numbers]
        slots.append(SlotInfo(env["HOROVOD_HOSTNAME"], *own))
    server.init(slots)
    held.callback(server.server_close)
    held.callback(server.shutdown)  # which waits for the thread
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(server.server_address[1]),
    }


def own_address(hosts: Sequence[str]) -> str:
    """Return the address of this machine that all hosts can reach."""
    if all(map(ssh.is_loopback, hosts)):
        return "127.0.0.1"
    remote = [host for host in hosts if not ssh.is_local(host)]
    if not remote:
        return socket.gethostbyname(hosts[0])
    # Connecting a UDP socket sends nothing; it asks the routing table which address would be used.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((remote[0], 9))
        return str(probe.getsockname()[0])
