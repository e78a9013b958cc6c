"""Places in MPI's world for ranks that `dtk run` starts; see `dtk.cluster.mpi_server`.

Failures, prefixes, binding and endings are dtk's as without MPI, and the server ends with the job.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from dtk.cluster.mpi_server import MPIServer
from dtk.launch import agent, job_processes, ssh
from dtk.launch.task import killer

_CUT_OFF = re.compile(
    r"lost communication with a remote daemon.*Remote daemon: \[\S+@\d+,(\d+)\] on node (\S+)"
)


class Loss(NamedTuple):
    """The end of what all ranks need: how, to begin a sentence with, and the exit code."""

    how: str
    code: int


class MPIPlaces(MPIServer):
    """The variables by which each rank joins MPI's world, and the server that they lead to."""

    def __init__(self, hosts: Sequence[str], job: str, remote_shell: str) -> None:
        alone = all(map(ssh.is_local, hosts))
        super().__init__(
            len(hosts), () if alone else hosts, remote_shell, job + job_processes.BESIDE
        )

    def held_up(self) -> str:
        """Return who may keep the server from answering the ranks, for a sentence; "" if nobody.

        It reads from one connection after the other, and waits for each.
        """
        own = job_processes.members(self._mark.removesuffix(job_processes.BESIDE))
        others = _strangers(self._process.pid, own)
        if not others:
            return ""
        return (
            f"MPI's server does not answer: {' and '.join(others)} is connected to its port on "
            "127.0.0.1, and says nothing. End that, or start with `dtk run --isolate`, which lets "
            "no other process reach the port, or with --communicator collective"
        )

    def lost(self) -> Loss | None:
        """Return how the server has ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        said = " ".join(self._said())
        killed = re.search(r"rank (\d+) with PID (\d+).*? exited on signal (\d+)", said)
        if killed:
            rank, pid, number = map(int, killed.groups())
            place = f"process {pid}, which MPI's server keeps in the place of rank {rank},"
            how = f"was ended by {killer(number)}, and with it the server (prterun)"
            return Loss(f"{place} {how}", 128 + number)
        server = f"MPI's server (prterun, process {self._process.pid})"
        cut = _CUT_OFF.search(said)
        # Its daemons count from 1, in the order of the hosts.
        others = list(dict.fromkeys(host for host in self._hosts if not ssh.is_local(host)))
        if cut and 0 < int(cut[1]) <= len(others):
            host = others[int(cut[1]) - 1]
            how = f"is cut off: {server} has lost its connection to that host (node {cut[2]})"
            return Loss(f"rank {self._hosts.index(host)}, host {host}, {how}", code or 1)
        if code < 0:
            return Loss(f"{server} was ended by {killer(-code)}", agent.shell_code(code))
        words = f", saying: {said:.500}" if said else ""
        return Loss(f"{server} ended with exit code {code}{words}", code or 1)

    def _end(self) -> None:
        super()._end()
        job_processes.end(self._mark, 0.0)


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
