"""MPI's servers of a job of `dtk run`, one on each of its hosts; see `dtk.cluster.pmix`."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from dtk.cluster import mpi_installs, mpi_server
from dtk.cluster.mpi_server import MPIServer
from dtk.errors import CommunicatorError
from dtk.launch import agent, job_processes, ssh
from dtk.launch.plan import Process
from dtk.launch.task import SSH_FAILED, killer

_HERE = "localhost"
_END = 2.0  # seconds that servers have to end


class Loss(NamedTuple):
    """The end of what all ranks need: how, to begin a sentence with, and the exit code."""

    how: str
    code: int


class MPIServers:
    """The servers, and the variables by which each rank joins MPI's world; none until `start`."""

    def __init__(self) -> None:
        self.env: list[dict[str, str]] = []  # of each rank
        self._servers: dict[str, MPIServer] = {}
        self._job = ""

    def start(self, processes: Sequence[Process], job: str, remote_shell: str) -> None:
        """Start a server on each host; raise if one does not start."""
        mpi_installs.required_mpirun()
        self._job = job
        machines: dict[str, list[int]] = {}
        for process in processes:
            host = _HERE if ssh.is_local(process.host) else process.host
            machines.setdefault(host, []).append(process.rank)
        missing = mpi_installs.shared_memory_missing(
            len(machines.get(_HERE, ())), mpi_server.SHARED_MEMORY
        )
        if _HERE in machines and missing:
            raise CommunicatorError(f"communicator mpi: {missing}")
        order: dict[str, object] = {
            "prefix": sys.prefix,
            "memory": mpi_server.SHARED_MEMORY,
            "namespace": f"dtk-{secrets.token_hex(8)}",
            "machines": list(machines.values()),
            "hosts": list(machines),
            "secret": secrets.token_hex(),
            "meeting": processes[0].address.rpartition(":")[0].strip("[]"),
            "ports": mpi_server.some_ports(),
            "job": job,
        }
        variables: dict[int, dict[str, str]] = {}
        for here, host in enumerate(machines):
            command: Sequence[str] = ssh.LOCAL_AGENT
            silence, name = 0.0, ""
            if host != _HERE:
                command = ssh.remote_command(host, remote_shell)
                silence, name = ssh.SILENCE, host
            line = ssh.first_line("mpi", **order, here=here, silence=silence)
            self._servers[host] = MPIServer(command, line, name)
            if not here:  # the others are to reach it
                variables, order["ports"] = self._servers[host].answer()
        for server in [*self._servers.values()][1:]:
            variables |= server.answer().variables
        self.env = [variables[process.rank] for process in processes]

    def beat(self) -> None:
        """Tell the servers that this process is alive."""
        for server in self._servers.values():
            server.beat()

    def held_up(self) -> str:
        """Return who may keep a server from answering the ranks, for a sentence; "" if nobody.

        It reads from one connection after the other, and waits for each.
        """
        server = self._servers.get(_HERE)
        others = [] if server is None else _strangers(server.pid, job_processes.members(self._job))
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
            if code == SSH_FAILED and host != _HERE:
                return Loss(f"host {host} is cut off: its remote shell has ended", code)
            if code < 0:
                return Loss(f"{name} was ended by {killer(-code)}", agent.shell_code(code))
            said = server.said()
            words = f", saying: {said:.500}" if said else ""
            return Loss(f"{name} ended with exit code {code}{words}", code or 1)
        return None

    def close(self) -> None:
        """Let the servers end; then there are none."""
        for server in self._servers.values():
            server.leave()
        deadline = time.monotonic() + _END
        while time.monotonic() < deadline and any(s.code is None for s in self._servers.values()):
            time.sleep(0.01)
        for server in self._servers.values():
            server.kill()
            server.close()
        self._servers = {}


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
