"""Reaching this machine and other hosts: what they are, and agents on them.

The remote shell is called as `ssh` is: `<remote shell> <host> <command>`, with the command as one
string for a shell over there. Anything that keeps this contract will do, for example a script
around `ip netns exec`.
"""

from __future__ import annotations

import contextlib
import inspect
import ipaddress
import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from dtk.cluster import line, pmix, report_channel, usage
from dtk.errors import ClusterError
from dtk.launch import agent, job_processes
from dtk.launch.agent import HostFacts as HostFacts

# Runs the agent where dtk is not installed, or not imported: in the order sent, each module finds
# those before it.
BOOTSTRAP = (
    "import json,sys,types;"
    "told=json.loads(sys.stdin.readline());"
    "load=lambda name,text:(sys.modules.update({name:types.ModuleType(name)}),"
    "exec(text,vars(sys.modules[name])));"
    "[load(*one) for one in told['modules'].items()];"
    "sys.exit(sys.modules['dtk.launch.agent'].main(told['task'],told['given']))"
)
LOCAL_AGENT = (sys.executable, "-I", "-S", "-c", BOOTSTRAP)  # on this machine
# Without a terminal there is nobody to answer a password prompt. A host that is silent for 45 s is
# lost.
DEFAULT_REMOTE_SHELL = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15"
# Seconds of silence after which an agent ends its rank, and seconds between two lines of the
# launcher. An outage that this side survives must not end ranks on the other: ssh gives a
# connection up after 45 to 60 s, and the last line before it may be `HEARTBEAT` older.
SILENCE = 90.0
HEARTBEAT = 10.0
_LEAVES = 5.0  # seconds that the guard has to leave, once it is told to
# If clocks differ by more seconds, the lines of a job are no longer in order.
_APART = 2.0
# What a shell returns for a program that it may not run, or that is not there.
_NO_PROGRAM = (126, 127)


def is_loopback(host: str) -> bool:
    """Return whether a host name means "this machine" on every machine."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def is_local(host: str) -> bool:
    """Return whether a host name means this machine, seen from this machine."""
    if is_loopback(host) or host == socket.gethostname():
        return True
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    import psutil  # here, since a job on this machine alone never asks

    own = {a.address.split("%")[0] for many in psutil.net_if_addrs().values() for a in many}
    return bool(addresses & own)


def first_line(task: str, **arguments: object) -> str:
    """Return what `BOOTSTRAP` reads: the agent, and what it is to do, see `agent.main`."""
    of_mpi = (line, pmix) if task == "mpi" else ()
    sent = (usage, report_channel, job_processes, *of_mpi, agent)
    modules = {one.__name__: inspect.getsource(one) for one in sent}
    return json.dumps({"modules": modules, "task": task, "given": arguments}) + "\n"


def survey(
    host: str, ports: int, remote_shell: str = DEFAULT_REMOTE_SHELL, python: str = sys.executable
) -> HostFacts:
    """Ask a host for free ports, its cores and its interface."""
    if is_local(host):
        try:
            return agent.survey("127.0.0.1" if host == "localhost" else host, ports)
        except OSError as error:
            raise ClusterError(
                f"host {host}: no free port: {error.strerror}; check its address"
            ) from None
    command = remote_command(host, remote_shell, python)
    order = first_line("tell", host=host, ports=ports).encode()
    asked = time.time()
    try:
        answer = subprocess.run(command, input=order, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        cause = str(error)
    else:
        with contextlib.suppress(ValueError, IndexError, TypeError):
            facts = HostFacts(**json.loads(answer.stdout.splitlines()[-1]))
            # It read its clock at some time in between.
            ahead = min(facts.ahead - asked, 0.0) + max(facts.ahead - time.time(), 0.0)
            return facts._replace(ahead=ahead)
        said = answer.stderr.decode(errors="replace").strip().splitlines()
        cause = said[-1] if said else "no answer"
        if answer.returncode == agent.NO_ADDRESS:
            raise ClusterError(
                f"host {host} can be reached, but {host} is no address of its own there ({cause}): "
                "ranks find each other by these names, which DNS or /etc/hosts of every host must "
                "know; one of ~/.ssh/config alone will not do"
            )
        if answer.returncode in _NO_PROGRAM:
            raise ClusterError(
                f"host {host} cannot run {python} ({cause}); it must be at the same path on "
                "every host: share its folder, or make it there too"
            )
    raise ClusterError(
        f"host {host} cannot be reached: {cause}; try `{remote_shell} {host} "
        f"{shlex.quote(python)} --version`"
    )


def compare(facts: Mapping[str, HostFacts]) -> list[str]:
    """Raise if versions differ between hosts; return warnings about clocks."""
    versions = {host: known.versions for host, known in facts.items()}
    if any(versions.values()):
        # Hosts without versions are this machine: add its versions.
        versions = {host: known or agent.versions() for host, known in versions.items()}
    for name in ("Python", "dtk", "tensorflow", "keras"):
        found = {host: known[name] for host, known in versions.items() if name in known}
        if len({*found.values()}) > 1:
            listed = ", ".join(f"{version} on {host}" for host, version in found.items())
            raise ClusterError(
                f"hosts differ in {name}: {listed}; ranks must compute alike: install the same "
                "everywhere, or share one environment"
            )
    return [
        f"the clock of {host} is {abs(known.ahead):.0f} s "
        f"{'ahead of' if known.ahead > 0 else 'behind'} this machine's: times in logs and files "
        "will not agree"
        for host, known in facts.items()
        if abs(known.ahead) > _APART
    ]


def remote_command(host: str, remote_shell: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs an agent on another host."""
    try:
        words = shlex.split(remote_shell)
    except ValueError as error:  # of shlex: "No closing quotation"
        raise ClusterError(
            f"the remote shell {remote_shell!r} cannot be read: {error}; expected a command such "
            f"as `{DEFAULT_REMOTE_SHELL}`"
        ) from None
    return [*words, host, shlex.join([python, "-c", BOOTSTRAP])]


def start_agent(
    command: Sequence[str], task: str, output: int, **arguments: object
) -> subprocess.Popen[bytes]:
    """Start an agent, by a command that runs `BOOTSTRAP`, which reads orders as lines."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
    )
    assert process.stdin is not None
    # Where the remote shell has failed already, its exit code and output say why.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(first_line(task, **arguments).encode())
        process.stdin.flush()
    return process


def hang_up(agent: subprocess.Popen[bytes]) -> None:
    """Close the line to an agent, which then ends what it has started."""
    if agent.stdin is not None:
        with contextlib.suppress(OSError):
            agent.stdin.close()


class Guard:
    """A process that ends the job, and removes a folder, if this one is killed before it can."""

    def __init__(self, job: str, grace: float, save_grace: float = 0.0, folder: str = "") -> None:
        orders = {"job": job, "grace": grace, "save_grace": save_grace, "folder": folder}
        self._process = start_agent(LOCAL_AGENT, "guard", subprocess.DEVNULL, **orders)

    def note_saving(self, saving: str, pid: int) -> None:
        """Tell what a rank here says of saving."""
        report_channel.write_line(self._process.stdin, f"{saving} {pid}")

    def close(self) -> None:
        """Tell the guard that all is well, and wait for it to leave, or end it."""
        report_channel.write_line(self._process.stdin, "done")
        hang_up(self._process)
        try:
            self._process.wait(_LEAVES)
        except subprocess.TimeoutExpired:  # it is stopped, as by SIGSTOP
            self._process.kill()
            self._process.wait()
