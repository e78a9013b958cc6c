"""The agent beside the ranks: runs one rank on another host, or is the guard on this one.

This file and those it imports are sent through the remote shell, so they use the standard library
alone and dtk need not be importable before the rank itself starts. The first line of standard input
is a JSON object. When standard input ends, the launcher is gone, and the agent ends what it
started. A silent launcher counts as gone, too: a connection whose cable was pulled does not end.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import functools
import json
import os
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dtk.cluster.report_channel import ask, pair, receive, record, takes_more, variables
from dtk.cluster.usage import NO_MEMORY, MemoryKills, cores_allowed, usage_of
from dtk.launch.job_processes import abort, end, members, start

_SIOCGIFADDR = 0x8915
NO_ADDRESS = 68  # exit code of an agent whose host does not know its own name; as of sysexits(3)
_LOOKS = 10  # at the silence of a launcher, before it counts as gone
_LAST_WORDS = 2.0  # seconds in which the last reports of a rank that has ended are read
_MARGIN = 1.0  # seconds: ranks that are out of patience say so themselves


class Order(enum.StrEnum):
    """What the launcher has an agent do with a rank.

    It also passes on what ranks say of saving, by which an agent, or the guard, knows whether they
    would save a checkpoint if the launcher were gone; see `dtk.cluster.progress`.
    """

    END = "end"  # by SIGTERM, but not its children
    ASK = "ask"  # to save and end, by its report channel
    STACK = "stack"  # end it such that it writes its stack first, also if it is stopped


def obey(order: str, rank: subprocess.Popen[bytes], reports: socket.socket) -> None:
    """Do with a rank of this host what is ordered."""
    if order == Order.END:
        rank.terminate()
    elif order == Order.ASK:
        ask(reports)
    elif order == Order.STACK:
        abort(rank.pid)


def reserve(host: str, port: int = 0) -> socket.socket:
    """Hold a port for a rank that will listen on it later.

    The socket is bound but does not listen, so the kernel gives the port to nobody else, while a
    server that sets SO_REUSEADDR (gRPC does) may still bind it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM
    )[0]
    held = socket.socket(family, kind, protocol)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address)
    except OSError:
        held.close()
        raise
    return held


class HostFacts(NamedTuple):
    """Facts about one host that a plan needs."""

    ports: Sequence[int]  # free ports on it
    cores: Sequence[int]  # those a process may use, neighbors side by side; see `cores`
    interface: str  # network interface that has its address; "" where there is none
    # of Python and packages on another host, by name, as far as they are installed
    versions: Mapping[str, str] = {}
    ahead: float = 0.0  # seconds its clock is ahead of this machine's, as far as that could be seen
    allowed: int | None = None  # cores whose time a process may use there; None: all

    @property
    def threads(self) -> int:
        """Threads that can compute on it at the same time."""
        return min(len(self.cores), self.allowed or len(self.cores))


def survey(host: str, ports: int) -> HostFacts:
    """Look at this host before placing ranks on it."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(reserve(host)) for _ in range(ports)]
        found = tuple(one.getsockname()[1] for one in sockets)
        return HostFacts(found, tuple(cores()), _interface(host), allowed=cores_allowed())


def versions() -> dict[str, str]:
    """Return the versions of Python, and of dtk, TensorFlow and Keras where they are installed."""
    import importlib.metadata  # 20 ms, which only jobs on several hosts pay

    installed = {"Python": "{}.{}".format(*sys.version_info)}
    for name, distributions in {
        "dtk": ["keras-dtk"],
        "tensorflow": ["tensorflow", "tensorflow-cpu", "tf-nightly"],
        "keras": ["keras", "keras-nightly"],
    }.items():
        for distribution in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                installed[name] = importlib.metadata.version(distribution)
    return installed


def cores(folder: str = "/sys/devices/system/cpu") -> list[int]:
    """List the cores this process may use, in the order of packages and physical cores."""
    return sorted(os.sched_getaffinity(0), key=lambda one: (*_place(f"{folder}/cpu{one}"), one))


def _place(core: str) -> tuple[int, ...]:
    """Package and physical core; Linux may count all second threads of cores after the first."""
    files = [Path(core, "topology", name) for name in ("physical_package_id", "core_id")]
    with contextlib.suppress(OSError):
        return tuple(int(file.read_text()) for file in files)
    return ()  # not every machine tells


def _interface(host: str) -> str:
    """Name the interface that has this host's address; "" lets the library choose."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        address = socket.gethostbyname(host)
        if address.startswith("127."):
            return "lo"
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return ""


def shell_code(code: int) -> int:
    """Turn a `subprocess` return code into what a shell would report."""
    return 128 - code if code < 0 else code


class Saver:
    """Asks ranks to end, once their launcher has gone, and waits for their checkpoints.

    What they print has no reader any more, and Python would end them for that before they have
    saved. So their pipes are kept open here, and read once the launcher is gone.
    """

    def __init__(self, job: str, grace: float) -> None:
        self._job, self._grace = job, grace
        self._pipes: dict[int, list[int]] = {}  # of those that a SIGTERM would have save

    def note(self, saving: str, pid: int) -> None:
        """Note what a rank says of saving."""
        if saving == "ready" and pid not in self._pipes:
            self._pipes[pid] = _opened(pid)
        elif saving in ("waits", "over"):
            for pipe in self._pipes.pop(pid, []):
                os.close(pipe)

    def let_save(self, serving: Collection[int] = ()) -> None:
        """Ask the ranks that would save to end, and wait until they have, or time is up."""
        asked = set(self._pipes) & set(members(self._job))
        saving = asked | set(serving)
        for pipes in self._pipes.values():
            for pipe in pipes:
                _thread(functools.partial(_read_out, pipe))
        for pid in asked:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 2 * self._grace + _MARGIN
        while saving and time.monotonic() < deadline:
            time.sleep(0.25)
            saving &= set(members(self._job))


def _opened(pid: int) -> list[int]:
    """Return the reading ends of what a process writes to, where these are pipes."""
    pipes = []
    for number in (1, 2):
        name = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(OSError):
            if os.readlink(name).startswith("pipe:"):
                pipes.append(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
                os.set_blocking(pipes[-1], True)
    return pipes


def _read_out(pipe: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(pipe, 1 << 16):
            pass


def run_rank(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    job: str,  # a mark of this rank alone
    grace: float,
    save_grace: float,
    serves: bool,  # whether others need it to save what they have
    watch_every: float,  # seconds between two looks at it, told to the launcher; 0 for none
    reserved: str,  # a port to hold until it ends, "host:port"; "" for none
    cores: Sequence[int],  # those it is bound to; all when empty
    foreign: Sequence[str],  # how variables begin that it must not take from this environment
    silence: float,  # seconds after which a launcher that says nothing is gone
) -> int:
    """Run one rank here until it ends or the launcher is gone; see `Order`."""
    held = contextlib.ExitStack()
    host, _, port = reserved.rpartition(":")
    if host:
        with contextlib.suppress(OSError):  # a port in use is reported by the rank itself
            held.enter_context(reserve(host, int(port)))
    reports, end_of_rank = pair()
    own = {name: text for name, text in os.environ.items() if not name.startswith(tuple(foreign))}
    environ = {**own, **env, **variables(end_of_rank)}
    try:
        with end_of_rank:
            rank = start(argv, environ, job, cores, cwd=cwd, keeps=[end_of_rank.fileno()])
    except OSError as error:
        print(f"cannot start {argv[0]} in {cwd}: {error.strerror}", file=sys.stderr)
        return 127
    saver = Saver(job, save_grace)
    kills = MemoryKills(rank.pid)

    def follow_launcher() -> None:
        is_needed = serves
        for order in orders(silence):
            is_needed &= order != "over"
            obey(order, rank, reports)
            if order not in [*Order]:
                saver.note(order, rank.pid)
        saver.let_save([rank.pid] if is_needed else [])
        end(job, grace)

    def watch() -> None:
        while rank.poll() is None:
            if seen := usage_of(rank.pid):
                _pass_on(json.dumps({"usage": seen}).encode())
            time.sleep(watch_every)

    def hear() -> None:
        with reports:
            while message := receive(reports):
                _pass_on(message)

    _thread(follow_launcher)
    if watch_every:
        _thread(watch)
    hearing = _thread(hear)
    code = rank.wait()
    if code == -signal.SIGKILL and kills.are_more():
        _say(record(json.dumps({"usage": NO_MEMORY}).encode()))
    end(job, 1.0, sessions=[rank.pid])
    hearing.join(_LAST_WORDS)
    return shell_code(code)


def _thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def orders(silence: float) -> Iterator[str]:
    """Return what the launcher says on standard input, word by word, until it is gone."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    _thread(read)
    looks = 0
    while looks < _LOOKS:
        try:
            line = lines.get(timeout=silence / _LOOKS)
        except queue.Empty:
            looks += 1
            continue
        looks = 0
        if not line:
            return
        if word := line.strip():
            yield word
    _say(f"dtk: the launcher said nothing for {silence:g} s; what it started is ended\n".encode())


def _pass_on(report: bytes) -> None:
    """Send a report of this host's to the launcher, among what the rank writes."""
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(2, record(report))


def _say(line: bytes) -> None:
    """Write a line to standard error, unless earlier output still waits for a reader."""
    if takes_more(2):
        with contextlib.suppress(OSError):
            os.write(2, line)


def guard(job: str, grace: float, save_grace: float, folder: str) -> None:
    """Wait for the launcher; if it dies without saying goodbye, end its job, and remove a folder.

    Ranks that would save a checkpoint have the time for it, as if the launcher had been asked to
    end. The launcher writes lines:

        ready PID       what a rank says of saving
        done            all is well: leave
    """
    saver = Saver(job, save_grace)
    for line in sys.stdin:
        word, _, pid = line.rstrip("\n").partition(" ")
        if word == "done":
            return
        saver.note(word, int(pid))
    saver.let_save()
    end(job, grace)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def serve_mpi(job: str, silence: float, **order: object) -> int:
    """Be MPI's server of this host, until the launcher is gone and the job's last rank here, too.

    Ranks still need it while they save, once the launcher has been killed.
    """
    from dtk.cluster.pmix import serve  # sent for this alone

    until, over = os.pipe()

    def follow() -> None:
        for _ in orders(silence) if silence else sys.stdin:
            pass
        while members(job):
            time.sleep(0.2)
        os.close(over)

    _thread(follow)
    return serve(**order, until=[until])  # type: ignore[arg-type]


def tell(host: str, ports: int) -> None:
    """Tell the launcher about this host."""
    try:
        facts = survey(host, ports)._replace(versions=versions(), ahead=time.time())
    except OSError as error:
        print(error.strerror, file=sys.stderr)
        sys.exit(NO_ADDRESS)
    print(json.dumps(facts._asdict()))


def main(task: str, arguments: Mapping[str, object]) -> int:
    """Do what the launcher asks for; return the exit code."""
    if task != "rank":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    works = {"rank": run_rank, "mpi": serve_mpi, "guard": guard, "tell": tell}
    return works[task](**arguments) or 0  # type: ignore[operator]
