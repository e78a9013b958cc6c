"""MPI's servers of a job of `dtk run`, one on each of its hosts; see `dtk.cluster.pmix`."""

from __future__ import annotations

import contextlib
import random
import secrets
import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

from dtk.cluster import mpi_installs, mpi_server, slurm
from dtk.cluster.mpi_server import MPIServer
from dtk.errors import CommunicatorError
from dtk.launch import agent, job_processes, ssh
from dtk.launch.plan import Process
from dtk.launch.task import killer

_PORTS = 20  # that are tried
_SSH_FAILED = 255


class Loss(NamedTuple):
    """The end of what all ranks need: how, to begin a sentence with, and the exit code."""

    how: str
    code: int


class MPIPlaces:
    """The servers, and the variables by which each rank joins MPI's world."""

    def __init__(self, processes: Sequence[Process], job: str, remote_shell: str) -> None:
        mpi_installs.required_mpirun()
        self._job = job
        self._servers: dict[str, MPIServer] = {}
        machines: dict[str, list[int]] = {}
        for process in processes:
            host = "localhost" if ssh.is_local(process.host) else process.host
            machines.setdefault(host, []).append(process.rank)
        order = {
            "prefix": sys.prefix,
            "memory": mpi_server.SHARED_MEMORY,
            "namespace": job,
            "machines": list(machines.values()),
            "hosts": list(machines),
            "secret": secrets.token_hex(),
            "meeting": processes[0].address.rpartition(":")[0].strip("[]"),
            "job": job,
        }
        ports = random.SystemRandom().sample(slurm.PORTS, _PORTS)
        variables: dict[int, dict[str, str]] = {}
        try:
            for here, (host, ranks) in enumerate(machines.items()):
                is_local = ssh.is_local(host)
                missing = mpi_installs.shared_memory_missing(len(ranks), mpi_server.SHARED_MEMORY)
                if is_local and missing:
                    raise CommunicatorError(f"communicator mpi: {missing}")
                command = [sys.executable, "-I", "-S", "-c", ssh.BOOTSTRAP]
                if not is_local:
                    command = ssh.remote_command(host, remote_shell)
                silence = 0.0 if is_local else ssh.SILENCE
                line = ssh.first_line("mpi", **order, here=here, ports=ports, silence=silence)
                self._servers[host] = MPIServer(command, line)
                served = self._servers[host].answer()
                variables |= served.variables
                ports = served.ports
        except BaseException:
            self.close()
            raise
        self.env = [variables[process.rank] for process in processes]

    def beat(self) -> None:
        """Tell the servers that this process is alive."""
        for server in self._servers.values():
            server.say("")

    def held_up(self) -> str:
        """Return who may keep a server from answering the ranks, for a sentence; "" if nobody.

        It reads from one connection after the other, and waits for each.
        """
        server = self._servers.get("localhost")
        own = job_processes.members(self._job)
        others = _strangers(server.pid, own) if server is not None else []
        if not others:
            return ""
        return (
            f"MPI's server does not answer: {' and '.join(others)} is connected to its port on "
            "127.0.0.1, and says nothing. End that, or start with `dtk run --isolate`, which lets "
            "no other process reach the port, or with --communicator collective"
        )

    def lost(self) -> Loss | None:
        """Return how a server has ended; None while all run."""
        for host, server in self._servers.items():
            if (code := server.code) is None:
                continue
            name = f"MPI's server on {host} (process {server.pid})"
            if code == _SSH_FAILED and not ssh.is_local(host):
                return Loss(f"host {host} is cut off: its remote shell has ended", code)
            if code < 0:
                return Loss(f"{name} was ended by {killer(-code)}", agent.shell_code(code))
            said = server.said()
            words = f", saying: {said:.500}" if said else ""
            return Loss(f"{name} ended with exit code {code}{words}", code or 1)
        return None

    def close(self) -> None:
        """Let the servers end."""
        for server in self._servers.values():
            server.close()


def _strangers(server: int, own: Collection[int]) -> list[str]:
    """Name the processes, other than our own, that are connected to one by 127.0.0.1."""
    import psutil  # here, since few jobs wait like that

    connections = psutil.net_connections("tcp4")
    listens = {
        one.laddr
        for one in connections
        if one.pid == server and one.status == psutil.CONN_LISTEN and one.laddr.ip == "127.0.0.1"
    }
    return [
        _named(one.pid)
        for one in connections
        if one.raddr in listens and one.status == psutil.CONN_ESTABLISHED and one.pid not in own
    ]


def _named(pid: int | None) -> str:
    import psutil

    if pid is None:
        return "a process of another user"
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return f"process {pid} ({process.name()}) of user {process.username()}"
    return f"process {pid}"
