"""Open MPI's server for ranks that it has not started, with the variables by which they join it.

The `mpirun` that `keras-dtk[mpi]` brings starts one small process for each rank, which
writes its variables and waits. A rank that has those variables takes its place: MPI's server on
that host knows a process by them, not by its id.

    mpirun --> sh: writes PMIX_RANK=0, PMIX_SERVER_URI=..., waits        (one for each rank)
    rank 0 of a job, with PMIX_RANK=0, ...  -- MPI_Init --> the server in mpirun

Source: the PMIx standard, version 5, "PMIx_server_setup_fork": what a process needs to join is in
its environment.

On each other host mpirun starts a daemon by a remote shell. Where ranks are there already, one of
them does that (`mpi_join`): what mpirun takes for a remote shell only writes the command to a pipe.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import multiprocessing.connection
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from dtk.cluster import mpi_installs, slurm
from dtk.cluster.line import Line
from dtk.cluster.variables import JOB_SECRET, MPI_LEASE, is_foreign
from dtk.errors import CommunicatorError

START_SECONDS = 30.0
# Of what mpirun gives a process, that which MPI reads.
_OURS = ("PMIX_", "OMPI_", "OPAL_", "PRTE_")
# An allocation that mpirun would place its processes in by itself.
_ALLOCATIONS = ("SLURM_", "PBS_", "LSB_", "SGE_", "PE_HOSTFILE", "COBALT_")
# Seconds, and how often: after 90 s of silence a server on another host ends, as ranks there do
# (`dtk.launch.ssh.SILENCE`); by itself it would after eight minutes.
_KEEPALIVE = {"time": "15", "intvl": "5", "probes": "15"}
# Opens a pipe for reading without waiting for somebody who writes.
_AWAIT = 'exec 4<>"$1" 3<"$1" 4<&-'
# Each process writes one line, which no other can mix with. Then it waits for the end of a pipe,
# which the launcher, or rank 0, and the ranks of this host have open as long as they live.
_PLACE = (
    f'leased=; [ -p "$1" ] && {_AWAIT} && leased=1; '
    f"grep -zE '^({'|'.join(_OURS)})' /proc/self/environ | base64 -w0; echo; "
    '[ "$leased" ] && exec cat <&3 >/dev/null; exec sleep 2147483647'
)
_PREFIX = "dtk-mpi-of-"
SHARED_MEMORY = Path("/dev/shm")


# Runs a server, or daemon, that no launcher ends, and then removes its files. What the network has
# cut off from the others waits for them, for a quarter of an hour: hence the end by force.
_LAST = (
    'lease=$1 folder=$2 other=$3; shift 3; "$@" & server=$!; '
    f'(set -- "$lease"; {_AWAIT}; cat <&3; n=30; while [ $((n -= 1)) -gt 0 ]; do sleep 1; done; '
    "kill -9 $(cat /proc/$server/task/$server/children) $server) >/dev/null 2>&1 & "
    'watch=$!; wait $server; code=$?; kill $watch; rm -rf "$folder" "$other"; exit $code'
)
_LEASE, _COMMANDS, _DAEMON = "lease", "commands", "prted"
# What mpirun takes for a remote shell: it says what is to be started, and where.
_SAY = f'printf "%s\\n" "$*" > "${{0%/*}}/{_COMMANDS}"\n'


class MPIServer:
    """A server for so many ranks: of this machine, or each on its host.

    With the mark of a job it is ended by that job's launcher; else it ends with the last rank.
    Other hosts are reached by a remote shell, or by `lines`: a rank of each, by the host's name.
    """

    def __init__(
        self,
        ranks: int,
        hosts: Sequence[str] = (),
        remote_shell: str = "",
        mark: str = "",
        lines: Mapping[str, Line] | None = None,
    ) -> None:
        self._ranks, self._hosts, self._mark = ranks, hosts, mark
        self._lines = lines or {}
        self._held = contextlib.ExitStack()
        self._memory: Path | None = None
        try:
            _remove_abandoned()
            self._folder = self._make(Path(tempfile.gettempdir()), [_LEASE, _COMMANDS])
            self._lease = self._folder / _LEASE
            self._open(self._lease)
            self._commands = self._open(self._folder / _COMMANDS)
            if self._lines:
                shell = self._folder / "start"
                shell.write_text(_SAY)
                remote_shell = f"sh {shell}"
            errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            self._errors = self._held.enter_context(errors)
            fcntl.fcntl(errors, fcntl.F_SETFL, os.O_APPEND)  # wherever it is read meanwhile
            self._process = self._start(remote_shell, self._errors.fileno())
            self._held.callback(self._end)
            self.env = self._read()
            self.folders = tuple(filter(None, (self._folder, self._memory)))
        except BaseException:
            self.close()
            raise

    def _make(self, place: Path, pipes: Sequence[str] = ()) -> Path:
        """Make a folder that is there, and locked, until the end."""
        folder, locked = _make_locked(place, pipes)
        self._held.callback(shutil.rmtree, folder, ignore_errors=True)
        self._held.callback(os.close, locked)
        return folder

    def _open(self, pipe: Path) -> int:
        end = os.open(pipe, os.O_RDWR | os.O_CLOEXEC)
        self._held.callback(os.close, end)
        return end

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
                self._memory = self._make(SHARED_MEMORY)
        else:
            names = self._folder / "hosts"
            names.write_text("".join(f"{host.strip('[]')}\n" for host in self._hosts))
            # The rank's number is that of its line.
            command += ["--map-by", "seq:OVERSUBSCRIBE", "--hostfile", str(names)]
            command += ["--prtemca", "plm_ssh_agent", remote_shell]
            for name, value in _KEEPALIVE.items():
                command += ["--prtemca", f"oob_tcp_keepalive_{name}", value]
        if self._lines:
            command += ["--prtemca", "plm_ssh_no_tree_spawn", "1"]
            # It listens at each of them that is free.
            ports = random.SystemRandom().sample(slurm.PORTS, 3)
            command += ["--prtemca", "oob_tcp_dynamic_ipv4_ports", ",".join(map(str, ports))]
        if not self._mark:
            left = map(str, (self._lease, self._folder, self._memory or self._folder))
            command = ["sh", "-c", _LAST, "sh", *left, *command]
        return subprocess.Popen(
            [*command, "sh", "-c", _PLACE, "sh", str(self._lease)],
            env=_environment(self._mark),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )

    def _read(self) -> list[dict[str, str]]:
        """Read the variables that the processes write, each a line; meanwhile start daemons."""
        assert self._process.stdout is not None
        written = self._process.stdout.fileno()
        envs: dict[int, dict[str, str]] = {}
        deadline, rest = time.monotonic() + START_SECONDS, b""
        ends = {line.end: host for host, line in self._lines.items()}
        with self._process.stdout:
            while len(envs) < self._ranks:
                left = max(0.0, deadline - time.monotonic())
                ready = multiprocessing.connection.wait([written, self._commands, *ends], left)
                if not ready:
                    silent = f"mpirun did not answer within {START_SECONDS:g} s"
                    raise CommunicatorError(self._why(self.held_up() or silent))
                for host in (host for end, host in ends.items() if end in ready):
                    if failed := self._failure(self._lines[host]):
                        raise CommunicatorError(self._why(f"{host}: {failed}"))
                if self._commands in ready:
                    self._pass_commands()
                if written in ready:
                    if not (read := os.read(written, 1 << 16)):
                        raise CommunicatorError(self._why())
                    *lines, rest = (rest + read).split(b"\n")
                    for env in map(_variables, lines):
                        if "PMIX_RANK" in env:  # else it is a line of MPI's own, of what is wrong
                            envs[int(env["PMIX_RANK"])] = env
        if not self._hosts:  # no port for messages that no other host sends
            extra = {"OMPI_MCA_btl": "self,sm"}
            if self._memory is not None:
                extra["OMPI_MCA_btl_sm_backing_directory"] = str(self._memory)
            for env in envs.values():
                env.update({name: os.environ.get(name, value) for name, value in extra.items()})
        return [{**envs[rank], MPI_LEASE: str(self._lease)} for rank in range(self._ranks)]

    def _pass_commands(self) -> None:
        """Have ranks on other hosts start the daemons that mpirun asks for."""
        text = os.read(self._commands, 1 << 20)  # more than a pipe holds, and so whole lines
        for line in text.decode().splitlines():
            host, *words = shlex.split(line)
            start = [os.path.basename(word) for word in words].index(_DAEMON)
            # As a daemon it would leave the process that removes its files. A bracket ends what is
            # for a shell of the user's.
            arguments = [word for word in words[start + 1 :] if word not in ("--daemonize", ")")]
            self._lines[host].send({"daemon": arguments, "folder": self._folder.name})

    def _failure(self, line: Line) -> str:
        """Return why a rank cannot have started MPI's daemon on its host; "" if it may have."""
        try:
            told = [one for one in line.receive() if one.get("folder") == self._folder.name]
        except (OSError, ValueError, AttributeError):
            return "the rank that was to start MPI's daemon there is gone"
        return str(told[0].get("failed")) if told else ""  # of a server before this one

    def held_up(self) -> str:
        """Return who may keep the server from answering the ranks, for a sentence; "" if nobody."""
        return ""

    def _said(self) -> list[str]:
        """Return what the server wrote, line by line."""
        self._errors.seek(0)
        return [line.strip() for line in self._errors if line.strip(" -\n")]

    def _why(self, held_up: str = "") -> str:
        if held_up:
            self._kill()
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


def start_daemon(arguments: Sequence[str], name: str, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start MPI's daemon of this host, which ends with the server, and its folder with it."""
    parent, made = Path(tempfile.gettempdir()), ""
    own, locked = _make_locked(parent)  # for what it writes
    locks = [locked]
    with contextlib.suppress(OSError):  # hosts may share it
        folder, locked = _make_locked(parent, [_LEASE], name)
        made, locks = str(folder), [*locks, locked]
    try:
        lease = parent / name / _LEASE
        os.open(lease, os.O_RDWR | os.O_CLOEXEC)  # until this process ends
        daemon = [str(Path(sys.executable).parent / _DAEMON), *arguments]
        return subprocess.Popen(
            ["sh", "-c", _LAST, "sh", str(lease), made, str(own), *daemon],
            env={**_environment(), "TMPDIR": str(own)},
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            pass_fds=locks,
        )
    finally:
        for locked in locks:
            os.close(locked)


def _remove_abandoned() -> None:
    """Remove what servers left whose processes were killed."""
    temporary = Path(tempfile.gettempdir())
    for folder in [*SHARED_MEMORY.glob(f"{_PREFIX}*"), *temporary.glob(f"{_PREFIX}*")]:
        with contextlib.suppress(OSError):  # another user's, in use, or gone meanwhile
            os.close(_lock(folder))
            shutil.rmtree(folder)


def _make_locked(place: Path, pipes: Sequence[str] = (), name: str = "") -> tuple[Path, int]:
    """Make a folder that is locked as long as somebody has open what is returned with it."""
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=place))
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, made)
        locked = _lock(made)
        undo.callback(os.close, locked)
        for pipe in pipes:
            os.mkfifo(made / pipe, 0o600)
        # Only now it has a name that `_remove_abandoned` looks for.
        folder = made.rename(place / (name or made.name[1:]))
        undo.pop_all()
    return folder, locked


def _environment(mark: str = "") -> dict[str, str]:
    """Return the variables of a server or daemon: none of an allocation, or of another job."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "SLURM_CONF"  # by which srun finds its controller
        or not (is_foreign(name) or name.startswith(_ALLOCATIONS))
    }
    if os.getuid() == 0:  # the user may start training as root, and so what it needs
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    kept.pop("DTK_JOB", None)  # what ends rank 0's processes is not to end those of others
    kept.pop(JOB_SECRET, None)  # a daemon sends its variables to the server as they are
    return {**kept, "DTK_JOB": mark} if mark else kept


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
