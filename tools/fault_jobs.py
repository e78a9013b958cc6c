"""Jobs that are started to be struck: how they start, are awaited, and end with all they left."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

import psutil

BIN = Path(sys.executable).parent
ENGINE = Path(__file__).parent / "engine.py"
MARK = "DTK_FAULTS"  # of every process of a trial
RANKS = 2
START = 90.0  # seconds until all ranks train, on a busy machine
END = 60.0  # seconds from the fault to the end of the job
STALL = 5.0


class Way(NamedTuple):
    """A way to start a job.

    Attributes:
        name: For the table.
        command: What comes before the script.
        named: Finds the rank that the launcher's report names.
    """

    name: str
    command: tuple[str, ...]
    named: str


def ways() -> list[Way]:
    """Return the ways to start a job that this machine has."""
    run = (str(BIN / "dtk"), "run", "-n", str(RANKS), "--stall-timeout", str(STALL))
    by_dtk = r"dtk: rank (\d+), host [^\s,]+, failed first"
    by_mpi = r"(?:process rank |Process name: \[\S+,)(\d+)"
    found = [Way("dtk run, collectives", (*run, "--communicator", "collective"), by_dtk)]
    by_rank = r"dtk: rank (\d+), host [^\s,]+, (?:failed|was gone) first"
    for name in ("collective", *(["mpi"] if (BIN / "mpirun").exists() else [])):
        command = ("env", f"DTK_COMMUNICATOR={name}", sys.executable, str(ENGINE), str(RANKS))
        found.append(Way(f"an engine, {name}", command, by_rank))
    mpirun, ours = shutil.which("mpirun"), BIN / "mpirun"
    if importlib.util.find_spec("horovod") is not None:
        found.append(Way("dtk run, Horovod", (*run, "--communicator", "horovod"), by_dtk))
        if mpirun is not None and Path(mpirun) != ours:
            command = (mpirun, "--oversubscribe", "-np", str(RANKS), sys.executable)
            found.append(Way("mpirun, Horovod", command, by_mpi))
    if ours.exists():
        found.append(Way("dtk run, MPI", (*run, "--communicator", "mpi"), by_dtk))
        command = (str(ours), "--oversubscribe", "-np", str(RANKS), sys.executable)
        found.append(Way("mpirun, MPI", command, by_mpi))
    return found


def awaited(
    job: subprocess.Popen[str], mark: str, told: TextIO, seconds: float
) -> tuple[list[str], str]:
    """Wait for the end of a job that was struck; return what is wrong with it, and what it said."""
    faults = []
    try:
        job.wait(seconds)
    except subprocess.TimeoutExpired:
        faults.append("hang")
        end(mark)
        job.wait(END)
    if not gone(mark):
        faults.append("left running")
    told.seek(0)
    return faults, told.read()


@contextlib.contextmanager
def started(
    command: list[str], mark: str, told: TextIO, output: TextIO | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a job in a session of its own; it is gone afterwards."""
    env = {**os.environ, MARK: mark, "DTK_STALL_TIMEOUT": str(STALL), "DTK_CALIBRATE": "0"}
    if os.getuid() == 0:
        env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output or subprocess.DEVNULL,
        stderr=told,
        start_new_session=True,
        text=True,
    ) as job:
        try:
            yield job
        finally:
            end(mark)


def task(process: psutil.Process) -> tuple[str, int] | None:
    """Return role and index of a task of a job with servers."""
    with contextlib.suppress(psutil.Error, KeyError, ValueError):
        told = json.loads(process.environ()["TF_CONFIG"])["task"]
        return told["type"], told["index"]
    return None


def marked(mark: str) -> list[psutil.Process]:
    """List the processes of a trial."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def gone(mark: str) -> bool:
    """Return whether a trial has left no process, a moment after the launcher ended."""
    deadline = time.monotonic() + 5.0
    while left := marked(mark):
        if time.monotonic() > deadline:
            print(*(f"left: {process.pid} {process.cmdline()}" for process in left), sep="\n")
            return False
        time.sleep(0.1)
    return True


def end(mark: str) -> None:
    """Kill what a trial has left."""
    for process in marked(mark):
        with contextlib.suppress(psutil.Error):
            process.kill()
