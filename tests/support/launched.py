"""Ranks of plain Python, and `dtk run` as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from dtk.launch import Job
from dtk.launch.plan import JobSpec, Process

DTK_RUN = (sys.executable, "-m", "dtk.cli.main", "run")


def a_job(processes, *, append=False, events=None, stdout=None, stderr=None, **settings):
    """A job of processes that are planned already; nobody watches its progress by default."""
    spec = JobSpec(
        processes=tuple(processes), **{"stall_timeout": 0.0, "max_restarts": 3, **settings}
    )
    return Job(spec, append=append, events=events, stdout=stdout, stderr=stderr)


def pids(job):
    """Process id by name (the remote shell's for a process on another host)."""
    return {rank.process.name: rank.popen.pid for rank in job._state.tasks}


def ranks(code, count=2, host="localhost", **env):
    """Ranks that run some code, each with its number as the argument."""
    command = (sys.executable, "-u", "-c", code)
    return [
        Process(f"rank {r}", "worker", r, host.format(r), (*command, str(r)), {"R": str(r), **env})
        for r in range(count)
    ]


def dtk_run(*arguments, cwd=None, timeout=120, **env):
    """See `dtk run` to its end."""
    return subprocess.run(
        [*DTK_RUN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, **env},
    )


def until(condition, seconds=30):
    """Wait until something is true, and no longer than a while."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found


# Ranks, as many as there are, of which each listens at its address and connects to the next.
RING = """
import json, os, socket, time
cluster = json.loads(os.environ["TF_CONFIG"])
r, workers = cluster["task"]["index"], cluster["cluster"]["worker"]
host, port = workers[r].split(":")
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.settimeout(20)
server.bind((host, int(port)))
server.listen()
for _ in range(200):
    try:
        there, port = workers[(r + 1) % len(workers)].split(":")
        out = socket.create_connection((there, int(port)), timeout=20)
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
out.sendall(str(r).encode())
print("heard", server.accept()[0].recv(9).decode(), "on", host)
"""
