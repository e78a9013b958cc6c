"""Starting ranks on this machine."""

from __future__ import annotations

import contextlib
import inspect
import ipaddress
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtk.cluster import report_channel, usage
from dtk.launch import agent, marked, orphans

# Runs the agent where dtk is not installed, or not imported: in the order sent, each module finds
# those before it.
BOOTSTRAP = (
    "import json,sys,types;"
    "told=json.loads(sys.stdin.readline());"
    "load=lambda name,text:(sys.modules.update({name:types.ModuleType(name)}),"
    "exec(text,vars(sys.modules[name])));"
    "[load(*one) for one in told['modules'].items()];"
    "sys.exit(sys.modules['dtk.launch.agent'].main(told['spec']))"
)
# What another launcher, or an outer `dtk run`, may have left in the environment: a rank must not
# take it for its own.
_FOREIGN = (
    "TF_CONFIG",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
    "HOROVOD_HOSTNAME",
    "DTK_HOSTS",
)
_FOREIGN_PREFIXES = (
    "OMPI_COMM_WORLD_",
    "PMI_",
    "PMIX_",
    "MPI_LOCAL",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_",
    "HOROVOD_CROSS_",
    "HOROVOD_GLOO_RENDEZVOUS_",
    "HOROVOD_GLOO_IFACE",
)

_LEAVES = 5.0  # seconds that the guard has to leave, once it is told to


def is_foreign(name: str) -> bool:
    """Return whether a variable places a process in some other job.

    >>> is_foreign("OMPI_COMM_WORLD_RANK"), is_foreign("PATH")
    (True, False)
    """
    return name in _FOREIGN or name.startswith(_FOREIGN_PREFIXES)


def is_loopback(host: str) -> bool:
    """Return whether a host name means "this machine" on every machine.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("node1")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_local(host: str) -> bool:
    """Return whether a host name means this machine, seen from this machine.

    >>> is_local("localhost")
    True
    """
    if is_loopback(host) or host == socket.gethostname():
        return True
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    import psutil  # here, since a job on this machine alone never asks

    own = {a.address.split("%")[0] for many in psutil.net_if_addrs().values() for a in many}
    return bool(addresses & own)


def first_line(spec: agent.Spec) -> str:
    """Return what `BOOTSTRAP` reads: the agent, and what it is to do."""
    sent = (usage, report_channel, marked, orphans, agent)
    modules = {one.__name__: inspect.getsource(one) for one in sent}
    return json.dumps({"modules": modules, "spec": spec}) + "\n"


def start(
    argv: tuple[str, ...],
    env: Mapping[str, str],
    job: str,
    cores: Sequence[int] = (),
    serves: bool = False,
    reports: socket.socket | None = None,
) -> subprocess.Popen[bytes]:
    """Start one rank here, in a session of its own.

    So a terminal's Ctrl-C reaches the launcher alone.

    >>> process = start((sys.executable, "-c", "print('hello')"), {}, "example")
    >>> process.communicate()[0]
    b'hello\\n'
    """
    inherited = {name: value for name, value in os.environ.items() if not is_foreign(name)}
    environ = {**inherited, **env, **(report_channel.variables(reports) if reports else {})}
    keeps = [reports.fileno()] if reports else []
    output = subprocess.PIPE
    return marked.start(argv, environ, job, cores, output=output, serves=serves, keeps=keeps)


class Guard:
    """A process that ends the job if this one is killed before it can.

    >>> Guard("example", grace=1.0).close()
    """

    def __init__(self, job: str, grace: float, save_grace: float = 0.0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._say(
            first_line({"task": "guard", "job": job, "grace": grace, "save_grace": save_grace})
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
            if marked.takes_more(pipe):  # one that is stopped reads nothing
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
