"""A stage of a pipeline that dies is named, and the others do not wait for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "how, said",
    [
        ("kill", "rank {}, host localhost failed first, by SIGKILL"),
        ("raise", "rank {}, host localhost failed first, with exit code 1"),
    ],
)
def test_a_dead_stage_is_named_and_the_job_ends(tmp_path, how, rank, said):
    done = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--no-bind"]
        + [str(Path(__file__).with_name("dead_stage.py")), str(tmp_path), how, str(rank)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_NUM_INTRAOP_THREADS": "1"},
    )
    ended = time.time()
    assert done.returncode != 0
    assert said.format(rank) in done.stderr, done.stderr
    assert ("ValueError: no such batch" in done.stderr) == (how == "raise")
    assert ended - (tmp_path / "dying").stat().st_mtime < 30, "seconds from its death to the end"
