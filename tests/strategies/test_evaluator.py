"""An evaluator beside the training: what it writes is what the saved weights give."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
RUN = [sys.executable, "-m", "dtk.cli.main", "run", "-n", "1", "--ps", "1", "--evaluator"]


def run(*arguments):
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    return subprocess.run(
        [*RUN, str(HERE / "evaluated.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150,
        env=env,
    )


def rows_of(directory):
    with open(directory / "evaluation.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_checkpoints_are_evaluated_as_they_appear(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path)
    assert [(row["epoch"], row["step"], row["iterations"]) for row in rows] == [
        ("0", "30", "30"),
        ("1", "20", "60"),
        ("2", "0", "80"),
    ]
    final = [float(word) for word in re.search(r"final (\S+) (\S+)", done.stdout).groups()]
    assert abs(float(rows[-1]["loss"]) - final[0]) <= 1e-5 * final[0]
    assert abs(float(rows[-1]["accuracy"]) - final[1]) <= 1e-6
    assert done.stdout.count("evaluator: checkpoint-") == 3
    assert "val_loss" not in done.stdout, "the chief need not stop to validate"
    assert list((tmp_path / "events" / "evaluation").iterdir())
    assert done.stderr == ""

    again = run(tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert len(rows_of(tmp_path)) == 3, "what had been evaluated was evaluated again"


@pytest.mark.parametrize(
    "wrong, said",
    [("no checkpoint", "no dtk.callbacks.Checkpoint"), ("no data", "no validation_data")],
)
def test_mistakes(tmp_path, wrong, said):
    done = run(tmp_path, wrong)
    assert done.returncode != 0
    assert f"evaluator 0: fit has {said}" in done.stderr, done.stderr
