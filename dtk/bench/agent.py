"""Runs beside each process of a world, on its host: `python -m dtk.bench.agent COMMAND`.

    command line ── socket ── agent ── pipes ── the worker process, which measures
                                └── stops and continues it

Some libraries keep a thread busy while nothing is asked of them. Stopped between its measurements
(SIGSTOP) such a process leaves the cores to the others, and only its parent can do that on every
host. The standard library alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Client, Connection
from typing import TypeAlias

ADDRESS, KEY = "DTK_BENCH_ADDRESS", "DTK_BENCH_KEY"
REST = {"rest": True}
# What mpirun starts is bound here: a list of cores for each rank, which may be empty.
CORES = "DTK_BENCH_CORES"

# To the command line: sends what JSON makes, receives what is asked, and None at the end.
Line: TypeAlias = "Connection[object, dict[str, object] | None]"


def run(command: list[str], line: Line) -> int:
    """Start a process and pass on what it is asked, until nothing more is asked."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    answer = process.stdout.readline()
    while answer:
        line.send(json.loads(answer))
        request = _next(line)
        while request == REST:
            process.send_signal(signal.SIGSTOP)
            # It goes on for a moment; and it may have ended, which is found out below.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            line.send(request)
            request = _next(line)
        process.send_signal(signal.SIGCONT)
        if request is None:
            break
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    process.stdin.close()
    code = process.wait()
    return 128 - code if code < 0 else code


def _next(line: Line) -> dict[str, object] | None:
    try:
        return line.recv()
    except EOFError:
        return None


def connect() -> Line:
    """Return the connection to whoever started this process; see `dtk.bench.ranks`."""
    host, _, port = os.environ[ADDRESS].rpartition(":")
    return Client((host, int(port)), authkey=bytes.fromhex(os.environ.pop(KEY)))


def main() -> None:
    """Bind this process, connect to the command line, and run the command that was given."""
    if CORES in os.environ:
        parts = json.loads(os.environ.pop(CORES))
        part = parts[int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"])]
        if part:
            os.sched_setaffinity(0, part)
    with connect() as line:
        sys.exit(run(sys.argv[1:], line))


if __name__ == "__main__":
    main()
