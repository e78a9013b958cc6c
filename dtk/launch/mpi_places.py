"""Places in MPI's world for ranks that dtk itself starts.

The `mpirun` that `keras-dtk[mpi]` brings starts one small process for each rank, which
writes its variables and waits. A rank that dtk starts with those variables takes its place: MPI's
server on that host knows a process by them, not by its id.

    mpirun --> sh: writes PMIX_RANK=0, PMIX_SERVER_URI=..., waits        (one for each rank)
    dtk run --> python train.py with PMIX_RANK=0, ...  -- MPI_Init --> the server in mpirun

So failures, prefixes, binding and endings are dtk's as without MPI, and the server ends with the
job. Source: the PMIx standard, version 5, "PMIx_server_setup_fork": what a process needs to join
is in its environment.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from dtk.cluster import mpi_installs
from dtk.cluster.variables import MPI_LEASE
from dtk.errors import CommunicatorError
from dtk.launch import agent, job_processes, ssh
from dtk.launch.task import killer

START_SECONDS = 30.0
# Of what mpirun gives a process, that which MPI reads.
_OURS = ("PMIX_", "OMPI_", "OPAL_", "PRTE_")
# An allocation that mpirun would place its processes in by itself.
_ALLOCATIONS = ("SLURM_", "PBS_", "LSB_", "SGE_", "PE_HOSTFILE", "COBALT_")
# Seconds, and how often: after 90 s of silence a server on another host ends, as ranks there do
# (`dtk.launch.ssh.SILENCE`); by itself it would after eight minutes.
_KEEPALIVE = {"time": "15", "intvl": "5", "probes": "15"}
# Each process writes one line, which no other can mix with. Then it waits for the end of a pipe,
# which the launcher and the ranks of this host have open as long as they live.
_PLACE = (
    "base64 -w0 < /proc/self/environ; echo; "
    '[ -p "$1" ] && exec cat "$1" >/dev/null; exec sleep 2147483647'
)
_CUT_OFF = re.compile(
    r"lost communication with a remote daemon.*Remote daemon: \[\S+@\d+,(\d+)\] on node (\S+)"
)
_PREFIX = "dtk-mpi-"
_SHARED_MEMORY = Path("/dev/shm")


class Loss(NamedTuple):
    """The end of what all ranks need: how, to begin a sentence with, and the exit code."""

    how: str
    code: int


class MPIPlaces:
    """The variables by which each rank joins MPI's world, and the server that they lead to."""

    def __init__(self, hosts: Sequence[str], job: str, remote_shell: str) -> None:
        self._job, self._hosts = job + job_processes.BESIDE, hosts
        self._alone = all(map(ssh.is_local, hosts))
        self._held = contextlib.ExitStack()
        self._folder = self._made()
        self._memory: Path | None = None
        self._lease = self._folder / "lease"
        os.mkfifo(self._lease, 0o600)
        self._held.callback(os.close, os.open(self._lease, os.O_RDWR | os.O_CLOEXEC))
        _remove_abandoned()
        try:
            with open(self._folder / "errors", "w") as errors:
                self._process = self._start(remote_shell, errors.fileno())
            self._held.callback(self._end)
            self.env = self._read()
            self.folders = tuple(filter(None, (self._folder, self._memory)))
        except BaseException:
            self.close()
            raise

    def _made(self, place: Path | None = None) -> Path:
        """Make a folder that is there until the end."""
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        self._held.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _start(self, remote_shell: str, errors: int) -> subprocess.Popen[bytes]:
        ranks = len(self._hosts)
        command = [str(mpi_installs.required_mpirun()), "--bind-to", "none", "-n", str(ranks)]
        # Its folder is named by its process id, and what a killed server with the same id left
        # in a common place would keep it from starting.
        command += ["--prtemca", "prte_local_tmpdir_base", str(self._folder)]
        if self._alone:
            command += ["--map-by", ":OVERSUBSCRIBE"]
            command += ["--prtemca", "oob_tcp_disable_ipv6_family", "1"]
            if missing := mpi_installs.shared_memory_missing(ranks, str(_SHARED_MEMORY)):
                raise CommunicatorError(f"communicator mpi: {missing}")
            with contextlib.suppress(OSError):  # then where MPI itself puts it
                self._memory = self._made(_SHARED_MEMORY)
                self._held.callback(os.close, _lock(self._memory))
        else:
            names = self._folder / "hosts"
            names.write_text("".join(f"{host.strip('[]')}\n" for host in self._hosts))
            # The rank's number is that of its line.
            command += ["--map-by", "seq:OVERSUBSCRIBE", "--hostfile", str(names)]
            command += ["--prtemca", "plm_ssh_agent", remote_shell]
            for name, value in _KEEPALIVE.items():
                command += ["--prtemca", f"oob_tcp_keepalive_{name}", value]
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == "SLURM_CONF"  # by which srun finds its controller
            or not (ssh.is_foreign(name) or name.startswith(_ALLOCATIONS))
        }
        if os.getuid() == 0:  # the user may start training as root, and so what it needs
            kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return subprocess.Popen(
            [*command, "sh", "-c", _PLACE, "sh", str(self._lease)],
            env={**kept, "DTK_JOB": self._job},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )

    def _read(self) -> list[dict[str, str]]:
        """Read the variables that the processes write, each a line."""
        assert self._process.stdout is not None
        held_up = ""

        def give_up() -> None:
            nonlocal held_up
            held_up = self.held_up()
            self._process.kill()

        late = threading.Timer(START_SECONDS, give_up)
        late.start()
        envs: dict[int, dict[str, str]] = {}
        try:
            with self._process.stdout as lines:
                while len(envs) < len(self._hosts):
                    line = lines.readline()
                    if not line:
                        raise CommunicatorError(self._why(held_up))
                    env = _variables(line)
                    if "PMIX_RANK" in env:  # else it is a line of MPI's own, about what is wrong
                        envs[int(env["PMIX_RANK"])] = env
        finally:
            late.cancel()
        if self._alone:  # no port for messages that no other host sends
            extra = {"OMPI_MCA_btl": "self,sm"}
            if self._memory is not None:
                extra["OMPI_MCA_btl_sm_backing_directory"] = str(self._memory)
            for env in envs.values():
                env.update({name: os.environ.get(name, value) for name, value in extra.items()})
        return [{**envs[rank], MPI_LEASE: str(self._lease)} for rank in range(len(self._hosts))]

    def held_up(self) -> str:
        """Return who may keep the server from answering the ranks, for a sentence; "" if nobody.

        It reads from one connection after the other, and waits for each.
        """
        own = job_processes.members(self._job.removesuffix(job_processes.BESIDE))
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

    def _said(self) -> list[str]:
        """Return what the server wrote, line by line."""
        lines = (self._folder / "errors").read_text(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip(" -\n")]

    def _why(self, held_up: str) -> str:
        code = self._process.wait()
        if held_up:
            return f"communicator mpi: in {START_SECONDS:g} s no rank could be placed. {held_up}"
        lines = self._said()
        return (
            f"communicator mpi: mpirun ended with exit code {agent.shell_code(code)} before the "
            f"ranks could start: {' '.join(lines[:6]) or 'it said nothing'}; use --communicator "
            "collective"
        )

    def _end(self) -> None:
        # At once: asked to end, it takes a quarter of a second, and removes no more than `close`.
        self._process.kill()
        self._process.wait()
        job_processes.end(self._job, 0.0)

    def close(self) -> None:
        """End the server, and remove what it left."""
        self._held.close()


def _remove_abandoned() -> None:
    """Remove shared memory of launchers that were killed together with their guards."""
    for folder in _SHARED_MEMORY.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, in use, or gone meanwhile
            os.close(_lock(folder))
            shutil.rmtree(folder)


def _lock(folder: Path) -> int:
    """Lock a folder for as long as this process lives, or until what is returned is closed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _variables(line: bytes) -> dict[str, str]:
    """Return those of a process that MPI reads."""
    try:
        text = base64.b64decode(line)
    except ValueError:
        return {}
    pairs = text.decode(errors="surrogateescape").split("\0")
    split = (pair.partition("=") for pair in pairs if pair.startswith(_OURS))
    return {name: value for name, _, value in split}


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
