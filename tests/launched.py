"""Ranks of plain Python, and `dtk run` as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys

from dtk.launch.plan import Process

DTK_RUN = (sys.executable, "-m", "dtk.cli.main", "run")


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
