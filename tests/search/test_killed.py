"""A rank that dies in the middle of a step: the job ends, and the next one goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest

import dtk

from search.bodies import failures, quiet

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("kill", "rank 1, host localhost failed first, by SIGKILL"),
        ("raise", "the other ranks did not end this trial within 2 s"),
    ],
)
def test_the_job_ends_and_the_next_one_makes_up_for_its_trial(tmp_path, how, said):
    done = subprocess.run(
        [sys.executable, "-m", "dtk.cli.main", "run", "-n", "2", "--no-bind"]
        + [str(Path(__file__).with_name("killed.py")), str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_NUM_INTRAOP_THREADS": "1"},
    )
    ended = time.time()
    assert done.returncode != 0
    assert ended - (tmp_path / "dying").stat().st_mtime < 30, "seconds from its death to the end"
    assert said in done.stderr, done.stderr
    if how == "raise":
        assert "ValueError: no such batch" in done.stderr

    def study():
        backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.journal"))
        return optuna.load_study(
            study_name="study", storage=optuna.storages.JournalStorage(backend)
        )

    assert [state for state, _ in failures(study())] in (
        ["COMPLETE", "RUNNING"],
        ["COMPLETE", "FAIL"],
    )
    with quiet():
        alone = dtk.strategies.AllReduceStrategy("local")
        found = dtk.search.optimize(study(), lambda trial: 1.0, 3, strategy=alone)
    states = [state for state, _ in failures(found)]
    assert states == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"], "three that count"
