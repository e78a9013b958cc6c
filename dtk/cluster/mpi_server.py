"""Open MPI's server for ranks that it has not started, with the variables by which they join it.

The `mpirun` that `keras-dtk[mpi]` brings starts one small process for each rank, which
writes its variables and waits. A rank that has those variables takes its place: MPI's server on
that host knows a process by them, not by its id.

    mpirun --> sh: writes PMIX_RANK=0, PMIX_SERVER_URI=..., waits        (one for each rank)
    rank 0 of a job, with PMIX_RANK=0, ...  -- MPI_Init --> the server in mpirun

Source: the PMIx standard, version 5, "PMIx_server_setup_fork": what a process needs to join is in
its environment.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from dtk.cluster import mpi_installs
from dtk.cluster.variables import MPI_LEASE, is_foreign
from dtk.errors import CommunicatorError

START_SECONDS = 30.0
# Of what mpirun gives a process, that which MPI reads.
_OURS = ("PMIX_", "OMPI_", "OPAL_", "PRTE_")
# An allocation that mpirun would place its processes in by itself.
_ALLOCATIONS = ("SLURM_", "PBS_", "LSB_", "SGE_", "PE_HOSTFILE", "COBALT_")
# Seconds, and how often: after 90 s of silence a server on another host ends, as ranks there do
# (`dtk.launch.ssh.SILENCE`); by itself it would after eight minutes.
_KEEPALIVE = {"time": "15", "intvl": "5", "probes": "15"}
# Each process writes one line, which no other can mix with. Then it waits for the end of a pipe,
# which the launcher, or rank 0, and the ranks of this host have open as long as they live.
_PLACE = (
    'leased=; [ -p "$1" ] && exec 3<"$1" && leased=1; base64 -w0 < /proc/self/environ; echo; '
    '[ "$leased" ] && exec cat <&3 >/dev/null; exec sleep 2147483647'
)
_PREFIX = "dtk-mpi-of-"
SHARED_MEMORY = Path("/dev/shm")


# Runs a server that no launcher ends, and then removes its files.
_LAST = 'folder=$1 memory=$2; shift 2; "$@"; rm -rf "$folder" "$memory"'


class MPIServer:
    """A server for so many ranks: of this machine, or each on its host.

    With the mark of a job it is ended by that job's launcher; else it ends with the last rank.
    """

    def __init__(
        self, ranks: int, hosts: Sequence[str] = (), remote_shell: str = "", mark: str = ""
    ) -> None:
        self._ranks, self._hosts, self._mark = ranks, hosts, mark
        self._held = contextlib.ExitStack()
        self._memory: Path | None = None
        try:
            _remove_abandoned()
            self._folder = self._made(Path(tempfile.gettempdir()))
            self._lease = self._folder / "lease"
            os.mkfifo(self._lease, 0o600)
            self._held.callback(os.close, os.open(self._lease, os.O_RDWR | os.O_CLOEXEC))
            with open(self._folder / "errors", "w") as errors:
                self._process = self._start(remote_shell, errors.fileno())
            self._held.callback(self._end)
            self.env = self._read()
            self.folders = tuple(filter(None, (self._folder, self._memory)))
        except BaseException:
            self.close()
            raise

    def _made(self, place: Path) -> Path:
        """Make a folder that is there, and locked, until the end."""
        made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
        try:
            locked = _lock(made)
        except OSError:
            made.rmdir()
            raise
        # Only now it has a name that `_remove_abandoned` looks for.
        folder = made.rename(place / made.name[1:])
        self._held.callback(shutil.rmtree, folder, ignore_errors=True)
        self._held.callback(os.close, locked)
        return folder

    def _start(self, remote_shell: str, errors: int) -> subprocess.Popen[bytes]:
        command = [str(mpi_installs.required_mpirun()), "--bind-to", "none"]
        command += ["-n", str(self._ranks)]
        # Its folder is named by its process id, and what a killed server with the same id left
        # in a common place would keep it from starting.
        command += ["--prtemca", "prte_local_tmpdir_base", str(self._folder)]
        if not self._hosts:
            command += ["--map-by", ":OVERSUBSCRIBE"]
            command += ["--prtemca", "oob_tcp_disable_ipv6_family", "1"]
            if missing := mpi_installs.shared_memory_missing(self._ranks, str(SHARED_MEMORY)):
                raise CommunicatorError(f"communicator mpi: {missing}")
            with contextlib.suppress(OSError):  # then where MPI itself puts it
                self._memory = self._made(SHARED_MEMORY)
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
            or not (is_foreign(name) or name.startswith(_ALLOCATIONS))
        }
        if not self._mark:  # what ends rank 0's processes is not to end those of others
            kept.pop("DTK_JOB", None)
        if os.getuid() == 0:  # the user may start training as root, and so what it needs
            kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if not self._mark:
            left = map(str, (self._folder, self._memory or self._folder))
            command = ["sh", "-c", _LAST, "sh", *left, *command]
        return subprocess.Popen(
            [*command, "sh", "-c", _PLACE, "sh", str(self._lease)],
            env={**kept, "DTK_JOB": self._mark} if self._mark else kept,
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
            held_up = self.held_up() or f"mpirun did not answer within {START_SECONDS:g} s"
            self._kill()

        late = threading.Timer(START_SECONDS, give_up)
        late.start()
        envs: dict[int, dict[str, str]] = {}
        try:
            with self._process.stdout as lines:
                while len(envs) < self._ranks:
                    line = lines.readline()
                    if not line:
                        raise CommunicatorError(self._why(held_up))
                    env = _variables(line)
                    if "PMIX_RANK" in env:  # else it is a line of MPI's own, about what is wrong
                        envs[int(env["PMIX_RANK"])] = env
        finally:
            late.cancel()
        if not self._hosts:  # no port for messages that no other host sends
            extra = {"OMPI_MCA_btl": "self,sm"}
            if self._memory is not None:
                extra["OMPI_MCA_btl_sm_backing_directory"] = str(self._memory)
            for env in envs.values():
                env.update({name: os.environ.get(name, value) for name, value in extra.items()})
        return [{**envs[rank], MPI_LEASE: str(self._lease)} for rank in range(self._ranks)]

    def held_up(self) -> str:
        """Return who may keep the server from answering the ranks, for a sentence; "" if nobody."""
        return ""

    def _said(self) -> list[str]:
        """Return what the server wrote, line by line."""
        lines = (self._folder / "errors").read_text(errors="replace").splitlines()
        return [line.strip() for line in lines if line.strip(" -\n")]

    def _why(self, held_up: str) -> str:
        code = self._process.wait()
        if held_up:
            return f"communicator mpi: no rank could be placed. {held_up}"
        lines = self._said()
        return (
            f"communicator mpi: mpirun ended with exit code {code} before the "
            f"ranks could start: {' '.join(lines[:6]) or 'it said nothing'}; use the communicator "
            "collective (DTK_COMMUNICATOR=collective)"
        )

    def _end(self) -> None:
        # At once: asked to end, it takes a quarter of a second, and removes no more than `close`.
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its session's: it may be in a shell

    def close(self) -> None:
        """End the server, and remove what it left."""
        self._held.close()


def _remove_abandoned() -> None:
    """Remove what servers left whose processes were killed."""
    temporary = Path(tempfile.gettempdir())
    for folder in [*SHARED_MEMORY.glob(f"{_PREFIX}*"), *temporary.glob(f"{_PREFIX}*")]:
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
