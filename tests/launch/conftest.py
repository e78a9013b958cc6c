"""Running jobs of real processes, of which nothing may be left."""

import io
import time

import psutil
import pytest

from dtk.launch import job_processes

from support.launched import a_job, pids


@pytest.fixture
def alive():
    """Whether a process runs, and not merely waits to be reaped by the machine's init process."""

    def alive(pid):
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return alive


@pytest.fixture
def run(alive):
    """Run a job to its end; returns exit code, stdout, stderr and seconds. Nothing may be left."""
    jobs = []

    def run(processes, wait=60, **options):
        out, err = io.StringIO(), io.StringIO()
        began = time.monotonic()
        job = a_job(processes, **{"grace": 1.0, "stdout": out, "stderr": err, **options})
        jobs.append(job)
        with job:
            code = job.wait(timeout=wait)
        return code, out.getvalue(), err.getvalue(), time.monotonic() - began

    yield run
    for job in jobs:
        assert job_processes.members(job.job_id) == []
        assert not any(alive(pid) for pid in pids(job).values())


@pytest.fixture
def shell(tmp_path):
    """A remote shell that reaches this machine by any name, with none of its variables."""
    script = tmp_path / "shell"
    script.write_text('#!/bin/sh\nhost=$1; shift; exec env -i REACHED=$host sh -c "$*"\n')
    script.chmod(0o755)
    return str(script)
